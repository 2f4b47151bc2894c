"""Beam search over a few candidates finds what fairseq's finds over the whole vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from fairseq.search import DiverseBeamSearch, Sampling
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lm_models import randomized, small_lm, stream
from helpers.models import batch, small_model, small_task
from relpos_fairseq.attention.native import build
from relpos_fairseq.inference.checkpoints import hooks, narrow_search
from relpos_fairseq.inference.checkpoints.narrow_search import ColumnModel, narrowed
from relpos_fairseq.nn.packed import pack, quantize

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C compiler")
PARTS = ("positional_scores", "attention", "score")


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """A block in which every search reads the whole vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "narrowed", lambda generator, prefix: generator)
        yield


@pytest.fixture(scope="module")
def model():
    """A model whose hypotheses go on with units of their own."""
    model = randomized(small_model(position_scheme="m4"))
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def words():
    return small_task().target_dictionary


def sample_of(rows: int) -> dict:
    source, _ = batch(rows=rows)
    return {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}


def assert_alike(found: list, expected: list, tolerance: float = 2e-5) -> None:
    """The same hypotheses, in one order, with the same numbers."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [one["tokens"].tolist() for one in ours] == [one["tokens"].tolist() for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for part in PARTS:
                torch.testing.assert_close(one[part], other[part], rtol=0, atol=tolerance)


OPTIONS = st.fixed_dictionaries(
    {
        "beam_size": st.integers(1, 9),
        "max_len_a": st.sampled_from([0.0, 0.7]),
        "max_len_b": st.integers(1, 14),
        "min_len": st.integers(0, 1),
        "normalize_scores": st.booleans(),
        "len_penalty": st.sampled_from([0.0, 1.0, 1.7]),
        "unk_penalty": st.sampled_from([0.0, 2.0, -3.0]),
        "temperature": st.sampled_from([1.0, 0.5, 3.0]),
        "match_source_len": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(options=OPTIONS, rows=st.integers(2, 6), begin=st.sampled_from([None, 5]))
def test_fairseqs_own(model, words, options: dict, rows: int, begin: int | None) -> None:
    generator = SequenceGenerator([model], words, **options)
    assert isinstance(narrowed(generator, None).model, ColumnModel)
    found = generator.generate([model], sample_of(rows), bos_token=begin)
    with wide():
        assert_alike(found, generator.generate([model], sample_of(rows), bos_token=begin))


@pytest.mark.parametrize("scheme", ["none", "shaw", "rope", "alibi"])
def test_a_language_model(scheme: str) -> None:
    """There is no source, and no attention over it."""
    lm = randomized(small_lm(position_scheme=scheme)).eval()
    generator = SequenceGenerator([lm], lm.decoder.dictionary, beam_size=4, max_len_b=9)
    sample = {"net_input": {"src_tokens": stream(3, 4)}}
    assert isinstance(narrowed(generator, None).model, ColumnModel)
    found = generator.generate([lm], sample)
    with wide():
        assert_alike(found, generator.generate([lm], sample))


def test_the_generator_stays_as_it_was(model, words) -> None:
    """A search of another thread may use it meanwhile."""
    generator = SequenceGenerator([model], words, beam_size=3, max_len_b=5)
    before = dict(generator.__dict__), dict(generator._modules)
    narrow = narrowed(generator, None)
    assert (dict(generator.__dict__), dict(generator._modules)) == before
    assert narrow.vocab_size == 4 + 6 < generator.vocab_size and narrow.search is not generator.search


def test_attention_is_computed_where_it_is_read(model, words) -> None:
    generator = SequenceGenerator([model], words, beam_size=2, max_len_b=5)
    assert generator.generate([model], sample_of(2))[0][0]["attention"].numel()
    expected = generator.generate([model], sample_of(2))
    generator.weighs = False
    found = generator.generate([model], sample_of(2))
    assert not found[0][0]["attention"].numel()
    assert [[one["tokens"].tolist() for one in row] for row in found] == [
        [one["tokens"].tolist() for one in row] for row in expected
    ]
    aligned = SequenceGeneratorWithAlignment([model], words, beam_size=2, max_len_b=5)
    assert aligned.generate([model], sample_of(2))[0][0]["alignment"]


def adaptive() -> torch.nn.Module:
    return small_model(adaptive_softmax_cutoff="6,9", share_decoder_input_output_embed=False).eval()


READS_ALL: dict[str, Callable] = {
    "an ensemble": lambda model, words: SequenceGenerator([model, model], words, beam_size=2),
    "another search": lambda model, words: SequenceGenerator([model], words, search_strategy=Sampling(words)),
    "groups": lambda model, words: SequenceGenerator(
        [model], words, beam_size=2, search_strategy=DiverseBeamSearch(words, 2, 0.5)
    ),
    "n-grams that are not repeated": lambda model, words: SequenceGenerator([model], words, no_repeat_ngram_size=2),
    "units that are not written": lambda model, words: SequenceGenerator([model], words, tokens_to_suppress=[words[5]]),
    "a language model beside it": lambda model, words: SequenceGenerator([model], words, lm_model=small_lm()),
    "a beam as wide as the vocabulary": lambda model, words: SequenceGenerator([model], words, beam_size=len(words)),
    "an adaptive softmax": lambda _, words: SequenceGenerator([adaptive()], words, beam_size=2),
    "half precision": lambda _, words: SequenceGenerator([small_model().bfloat16()], words, beam_size=2),
}


@pytest.mark.parametrize("why", READS_ALL)
def test_what_reads_the_whole_vocabulary(model, words, why: str) -> None:
    generator = READS_ALL[why](model, words)
    assert narrowed(generator, None) is generator


def test_of_the_call(model, words, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix, autocast, no compiler, an end that stands far behind in the vocabulary."""
    generator = SequenceGenerator([model], words, beam_size=2)
    assert narrowed(generator, None) is not generator
    assert narrowed(generator, torch.zeros(1, 1)) is generator
    with torch.autocast("cpu"):
        assert narrowed(generator, None) is generator
    with monkeypatch.context() as patch:
        patch.setattr(narrow_search, "serves", lambda logits: False)
        assert narrowed(generator, None) is generator
    far = SequenceGenerator([model], words, beam_size=2, eos=narrow_search.MOST_NAMED)
    assert narrowed(far, None) is far


@pytest.mark.parametrize("kind", ["packed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_packed_model_in_another_type(kind, dtype, words) -> None:
    """What a kernel has packed in fp32 it is not given in fp64."""
    model = randomized(small_model(position_scheme="alibi"))
    (pack if kind == "packed" else lambda one: quantize(one, "int8"))(model)
    model.to(dtype)
    generator = SequenceGenerator([model], words, beam_size=3, max_len_b=8)
    found = generator.generate([model], sample_of(3))
    with wide():
        expected = generator.generate([model], sample_of(3))
    assert_alike(found, expected)


def test_a_model_with_probabilities_of_its_own_reads_all(words) -> None:
    model = small_model()

    class Other(type(model)):
        def get_normalized_probs(self, *given, **more):
            return super().get_normalized_probs(*given, **more).roll(3, -1)

    generator = SequenceGenerator([model], words)
    assert narrowed(generator, None) is not generator
    model.__class__ = Other
    assert narrowed(generator, None) is generator
    generator.model.__class__ = type("Ours", (EnsembleModel,), {})
    model.__class__ = Other.__base__
    assert narrowed(generator, None) is generator
