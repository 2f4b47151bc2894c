"""Beam search by the kernel finds what fairseq's finds over the whole vocabulary."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from fairseq.search import DiverseBeamSearch, Sampling
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.tasks.translation import TranslationTask
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lm_models import randomized, small_lm, stream
from helpers.models import fairseq_model, small_model, small_task
from relpos_fairseq.attention.native import build, search
from relpos_fairseq.attention.native.search import Search
from relpos_fairseq.inference.checkpoints import beam_search, hooks
from relpos_fairseq.nn.packed import pack, prepare, quantize
from relpos_fairseq.schemes import scheme_class, scheme_names

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C compiler")
PARTS = ("positional_scores", "attention", "score")
PREPARED = "none sinusoidal learned shaw shaw_keys t5 m1 m2 m3 m4 deberta alibi kerple sandwich log_cpb fire".split()
PREPARED += ["rope"]
SHAPES = {
    "norms before": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "norm of embeddings": {"layernorm_embedding": True},
    "no scale": {"no_scale_embedding": True},
    "one dictionary": {"share_all_embeddings": True},
    "no norm at the end": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "no attention to the source": {"no_cross_attention": True},
}


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """A block in which fairseq's own loop searches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_search, "serves", lambda *given: False)
        yield


def lively(**values):
    """A packed model whose hypotheses go on with units of their own."""
    model = randomized(small_model(**values)).float()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(1.5)
    prepare(model, None)
    return model


@pytest.fixture(scope="module")
def words():
    return small_task().target_dictionary


@pytest.fixture(scope="module")
def models() -> dict:
    return {name: lively(position_scheme=name) for name in ("m4", "t5", "rope", "m4m", "learned+fox")}


def sources_of(seed: int, *lengths: int) -> dict:
    """A batch of sentences of so many words, padded on the left."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.ones(len(lengths), max(lengths) + 1, dtype=torch.long)
    for row, length in zip(tokens, lengths, strict=True):
        row[-1 - length :] = torch.cat([torch.randint(4, 24, (length,), generator=draw), torch.tensor([2])])
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths) + 1}}


def unread(weighs: bool = False) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if weighs else beam_search.attention_unread()


def searched(model, words, sample: dict, begin: int | None = None, *, weighs: bool = False, **options) -> tuple:
    """What the search finds, and what fairseq's does."""
    generator = SequenceGenerator([model], words, **options)
    with counted() as calls, unread(weighs):
        found = generator.generate([model], sample, bos_token=begin)
    assert calls
    with wide():
        expected = generator.generate([model], sample, bos_token=begin)
    nothing = {} if weighs else {"attention": torch.empty(0)}
    return found, [[one | nothing for one in row] for row in expected]


def of_both(generator: SequenceGenerator, sample: dict, begin=None) -> Iterator[list]:
    """What a generator finds, whichever search does it, and what fairseq's loop does; both without attention."""
    for block in (contextlib.nullcontext(), wide()):
        with block, unread():
            found = generator.generate(generator.model.models, sample, bos_token=begin)
        yield [[one | {"attention": torch.empty(0)} for one in row] for row in found]


def assert_alike(found: list, expected: list, tolerance: float = 2e-5) -> None:
    """The same hypotheses, in one order, with the same numbers."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [one["tokens"].tolist() for one in ours] == [one["tokens"].tolist() for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for part in PARTS:
                torch.testing.assert_close(one[part], other[part], rtol=1e-6, atol=tolerance)


@contextlib.contextmanager
def counted() -> Iterator[list]:
    """A block whose list has the number of steps of each call of the kernel, 0 where it chooses alone."""
    steps, original = [], Search._run

    def run(self):
        before = self.step
        done = original(self)
        steps.append(self.step - before if self._call.num_layers else 0)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_run", run)
        yield steps


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


@settings(max_examples=150, deadline=None)
@given(
    options=OPTIONS,
    name=st.sampled_from(["m4", "t5", "rope", "m4m", "learned+fox"]),
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    begin=st.sampled_from([None, 5]),
    weighs=st.booleans(),
)
def test_fairseqs_own(models, words, options, name, seed, lengths, begin, weighs) -> None:
    assert_alike(*searched(models[name], words, sources_of(seed, *lengths), begin, weighs=weighs, **options))


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("lengths", [(6,), (6, 2, 4)], ids=["alone", "three"])
def test_every_scheme(scheme: str, lengths: tuple, words) -> None:
    """Long enough for two changes of the room that decoding has.

    By this seed no order of hypotheses hangs on rounding: weights that differ by 3e-6 have the same.  Models that
    repeat themselves have ties, which processors break otherwise.
    """
    encoder = {"encoder_position_scheme": "none"} if scheme_class(scheme).causal_only else {}
    model = lively(position_scheme=scheme, **encoder)
    with counted() as steps:
        found, expected = searched(model, words, sources_of(7, *lengths), beam_size=3, max_len_b=70, min_len=68)
    if scheme in PREPARED:
        assert steps == [32, 32, 7]
    assert_alike(found, expected, 2e-4)


@pytest.mark.parametrize("scheme", ["m4", "rope"])
def test_a_call_of_much_work_is_of_fewer_steps(scheme: str, words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them Python sees Ctrl-C."""
    model = lively(position_scheme=scheme)
    decoder = model.decoder
    linear = [module for layer in decoder.layers for module in (layer.fc1, layer.fc2)]
    products = sum(module.weight.numel() for module in (*linear, decoder.output_projection))
    products += sum(3 * layer.self_attn.q_proj.weight.numel() for layer in decoder.layers)
    monkeypatch.setattr(search, "WORK_OF_A_CALL", 5 * 6 * products)
    with counted() as steps:
        assert_alike(*searched(model, words, sources_of(3, 6, 4), beam_size=3, max_len_b=40, min_len=38), 2e-4)
    assert steps[:6] == [5] * 6


@pytest.mark.parametrize(("scheme", "scale", "left"), [("m4", 0.25, 4), ("m4", 0.5, 1), ("m4m", 0.5, 2)])
def test_sentences_that_end_leave_their_rows_to_others(scheme: str, scale: float, left: int, words) -> None:
    """Before and after a change of the room, where most of the six sources are still read or few."""
    model = lively(position_scheme=scheme, share_decoder_input_output_embed=False)
    with torch.no_grad():
        weight = model.decoder.output_projection.weight.mul_(0.3)
        weight[2] = torch.randn(weight.size(1), generator=torch.Generator().manual_seed(2)) * scale
    found, expected = searched(model, words, sources_of(5, 3, 9, 2, 7, 5, 8), beam_size=2, max_len_b=60)
    assert_alike(found, expected, 2e-4)
    lengths = [max(len(one["tokens"]) for one in row) for row in found]
    assert sum(length > 32 for length in lengths) == left and len({*lengths}) > 2, lengths


def test_a_batch_of_mixed_lengths(models, words) -> None:
    sample = sources_of(8, *[4, 19, 3, 9, 1, 12, 7, 2] * 4)
    assert_alike(*searched(models["m4"], words, sample, beam_size=2, max_len_b=5))


JOINED = {  # options, and whether the kernel evaluates whole steps
    "pairs are halves": ({"position_scheme": "rope", "position_rope_pairs": "halves"}, True),
    "some channels": ({"position_scheme": "rope", "position_rope_share": "0.5"}, True),
    "a table beside turns": ({"position_scheme": "rope+t5"}, True),
    "turns in one layer": ({"position_scheme": "rope/shaw"}, True),
    "shared by layers": ({"position_scheme": "learned+m4", "position_share": "layers"}, True),
    "a temperature": ({"position_scheme": "rope", "position_rope_log_n": "on", "position_rope_length": "4"}, False),
    "unturned queries beside turned ones": ({"position_scheme": "rope+shaw"}, False),
    "gates in one layer": ({"position_scheme": "m4/fox", "encoder_position_scheme": "m4"}, False),
}


@pytest.mark.parametrize("which", JOINED)
def test_joined_schemes(which: str, words) -> None:
    values, is_whole = JOINED[which]
    model = lively(**values)
    with counted() as steps:
        assert_alike(*searched(model, words, sources_of(3, 6, 3), beam_size=3, max_len_b=40, min_len=38), 2e-4)
    assert (max(steps) > 1) is is_whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["m4", "learned"])
def test_shapes(shape: str, scheme: str, words) -> None:
    model = lively(position_scheme=scheme, **SHAPES[shape])
    with counted() as steps:
        assert_alike(*searched(model, words, sources_of(1, 5, 8), beam_size=4, max_len_b=12))
    assert max(steps) > 1


@pytest.mark.parametrize("kind", ["packed", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [(7,), (5, 3, 6)])
def test_other_weights(kind: str, dtype: torch.dtype, lengths: tuple, words) -> None:
    """What a kernel has packed in fp32 it is not given in fp64."""
    model = randomized(small_model(position_scheme="shaw"))
    (pack if kind == "packed" else lambda one: quantize(one, "int8"))(model)
    assert_alike(*searched(model.to(dtype), words, sources_of(4, *lengths), beam_size=4, max_len_b=12, weighs=True))


def test_unpacked_weights(words) -> None:
    model = randomized(small_model(position_scheme="shaw")).float()
    assert_alike(*searched(model, words, sources_of(4, 7, 2), beam_size=4, max_len_b=12))


@pytest.mark.parametrize("scheme", ["none", "shaw", "rope", "alibi"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_language_model(scheme: str, rows: int) -> None:
    """There is no source, and no attention over it."""
    lm = randomized(small_lm(position_scheme=scheme)).float().eval()
    prepare(lm, None)
    for weighs in (False, True):
        sample = {"net_input": {"src_tokens": stream(rows, 4)}}
        assert_alike(*searched(lm, lm.decoder.dictionary, sample, max_len_b=40, weighs=weighs))


def test_a_table_is_read_as_far_as_hypotheses_go(words) -> None:
    """The length of the source, which is theirs here, may be greater than the table's, at whose end they all end."""
    model = lively(position_scheme="learned", max_target_positions=8, encoder_position_scheme="none")
    options = {"beam_size": 2, "match_source_len": True}
    with torch.no_grad():
        model.decoder.layers[1].final_layer_norm.bias.fill_(9)
        model.decoder.output_projection.weight[2].fill_(9)
    assert_alike(*searched(model, words, sources_of(4, 12, 7), **options))
    with pytest.raises(ValueError, match="8 positions and the input has 9"):
        searched(model, words, sources_of(4, 12), min_len=9, **options)


def test_hypotheses_longer_than_their_source_are_the_least_likely(models, words) -> None:
    """Where the length of the longest source is that of all hypotheses."""
    options = {"beam_size": 3, "match_source_len": True, "min_len": 6}
    found, expected = searched(models["m4"], words, sources_of(4, 9, 2), **options)
    assert_alike(found, expected)
    assert float(found[1][0]["score"]) == float("-inf") < float(found[0][0]["score"])


def test_hypotheses_that_begin_with_padding(models, words) -> None:
    """Fairseq hides their first token."""
    generator = SequenceGenerator([models["m4"]], words, max_len_b=9)
    found = generator.generate([models["m4"]], sources_of(1, 5), bos_token=1)
    with wide():
        assert_alike(found, generator.generate([models["m4"]], sources_of(1, 5), bos_token=1))


@pytest.mark.parametrize("scheme", ["m4", "rope"])
def test_another_default_type(scheme: str, words) -> None:
    model = lively(position_scheme=scheme)
    torch.set_default_dtype(torch.float64)
    try:
        assert_alike(*searched(model, words, sources_of(1, 5, 3), max_len_b=9))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("part", ["layers.1", "dropout_module"])
def test_a_hook_sees_every_step(part: str, words) -> None:
    model, seen = lively(position_scheme="m4"), []
    model.decoder.get_submodule(part).register_forward_hook(lambda *given: seen.append(1))
    searched(model, words, sources_of(1, 5, 4), beam_size=2, max_len_b=9, min_len=9)
    assert len(seen) == 20


REPLACED = (
    "forward",
    "extract_features",
    "extract_features_scriptable",
    "embed",
    "output_layer",
    "get_normalized_probs",
)


@pytest.mark.parametrize("name", REPLACED)
def test_what_stands_in_a_methods_place_sees_every_step(name: str, words) -> None:
    """As a wrapper does that an instance is given."""
    model, seen = lively(position_scheme="m4"), []
    original = getattr(model.decoder, name)
    model.decoder.__dict__[name] = lambda *given, **more: (seen.append(1), original(*given, **more))[1]
    generator = SequenceGenerator([model], words, beam_size=2, max_len_b=9, min_len=9)
    assert_alike(*of_both(generator, sources_of(1, 5, 4)))
    assert len(seen) == 20


@pytest.mark.parametrize("part", ["dropout_module", "layers.1.dropout_module"])
def test_dropout_that_stays_in_training_mode_drops(part: str, words) -> None:
    """As where uncertainty is found by several runs of a model that is in evaluation mode else."""
    model = lively(position_scheme="m4", dropout=0.3)
    generator = SequenceGenerator([model], words, beam_size=2, max_len_b=9)

    def scores() -> list:
        with unread():
            return generator.generate([model], sources_of(1, 5, 4))[0][0]["positional_scores"].tolist()

    assert scores() == scores()
    model.decoder.get_submodule(part).train()
    assert scores() != scores()


def test_embeddings_that_stand_by_column(words) -> None:
    model = lively(position_scheme="m4", share_decoder_input_output_embed=False)
    weight = model.decoder.embed_tokens.weight
    weight.data = weight.data.t().contiguous().t()
    assert_alike(*searched(model, words, sources_of(1, 5, 3), max_len_b=9))


@pytest.mark.parametrize("begin", [-1, 24, 10**6])
def test_hypotheses_that_begin_outside_the_vocabulary(models, words, begin: int) -> None:
    with pytest.raises(IndexError):
        SequenceGenerator([models["m4"]], words).generate([models["m4"]], sources_of(1, 5), bos_token=begin)


@pytest.mark.parametrize("begin", [torch.tensor(5), torch.tensor([5]), torch.tensor([5, 6, 7, 8])])
def test_tokens_of_a_tensor_that_hypotheses_begin_with(models, words, begin: torch.Tensor) -> None:
    generator = SequenceGenerator([models["m4"]], words, beam_size=2, max_len_b=9)
    assert_alike(*of_both(generator, sources_of(1, 5, 3), begin))


def test_an_encoder_of_fairseqs(words) -> None:
    """It selects rows as fairseq's does, and does not know which of them are one source's."""
    model = lively(position_scheme="m4")
    model.encoder = fairseq_model().encoder
    assert_alike(*of_both(SequenceGenerator([model], words, beam_size=2, max_len_b=9), sources_of(1, 5, 3)))


def test_odd_lengths(models, words) -> None:
    """A least length between two, and a greatest below 0, where fairseq takes no step."""
    assert_alike(*searched(models["m4"], words, sources_of(1, 5, 3), min_len=2.5, max_len_b=9))
    generator = SequenceGenerator([models["m4"]], words, min_len=-1, max_len_b=-1)
    assert generator.generate([models["m4"]], sources_of(1, 5, 3)) == [[], []]


def test_weights_that_change_between_sentences(words) -> None:
    model = lively(position_scheme="m4", share_decoder_input_output_embed=False)
    before, _ = searched(model, words, sources_of(1, 5), max_len_b=9)
    with torch.no_grad():
        model.decoder.embed_tokens.weight.mul_(-2)
        model.decoder.layers[0].final_layer_norm.bias.add_(3)
    found, expected = searched(model, words, sources_of(1, 5), max_len_b=9)
    assert_alike(found, expected)
    assert found[0][0]["positional_scores"].tolist() != before[0][0]["positional_scores"].tolist()


def test_a_model_that_finds_no_numbers(words) -> None:
    """Fairseq ends in an assertion too."""
    model = lively(position_scheme="m4")
    with torch.no_grad():
        model.decoder.layers[1].final_layer_norm.weight.fill_(float("nan"))
    generator = SequenceGenerator([model], words, max_len_b=9)
    with unread(), pytest.raises(AssertionError, match="within 9 units: the model finds no numbers"):
        generator.generate([model], sources_of(1, 5, 4))
    with wide(), pytest.raises(AssertionError):
        generator.generate([model], sources_of(1, 5, 4))


def test_attention_is_computed_where_it_is_read(models, words) -> None:
    """By who searches with fairseq's classes; not by its commands, but where a task of one's own may read it."""
    model, sample = models["m4"], sources_of(2, 5, 3)

    def attention_of(cfg) -> torch.Tensor:
        return SequenceGenerator([model], words, beam_size=2, max_len_b=5).generate([model], sample)[0][0]["attention"]

    class Own(TranslationTask):
        def inference_step(self, *given, **more):
            return super().inference_step(*given, **more)

    assert attention_of(None).numel()
    assert not hooks.generate(attention_of, SimpleNamespace(task=SimpleNamespace(_name="translation"))).numel()
    assert not hooks.generate(attention_of, Namespace(task="translation")).numel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hooks.TASK_REGISTRY, "own", Own)
        assert hooks.generate(attention_of, SimpleNamespace(task=SimpleNamespace(_name="own"))).numel()
    aligned = SequenceGeneratorWithAlignment([model], words, beam_size=2, max_len_b=5)
    with unread():
        assert aligned.generate([model], sample)[0][0]["alignment"]


def adaptive() -> torch.nn.Module:
    return small_model(adaptive_softmax_cutoff="6,9", share_decoder_input_output_embed=False).eval()


READS_ALL: dict[str, Callable] = {
    "an ensemble": lambda model, words: SequenceGenerator([model, model], words, beam_size=2),
    "another search": lambda model, words: SequenceGenerator([model], words, search_strategy=Sampling(words)),
    "groups": lambda model, words: SequenceGenerator(
        [model], words, beam_size=2, search_strategy=DiverseBeamSearch(words, 2, 0.5)
    ),
    "a generator of one's own": lambda model, words: type("Own", (SequenceGenerator,), {})([model], words),
    "alignments": lambda model, words: SequenceGeneratorWithAlignment([model], words),
    "n-grams that are not repeated": lambda model, words: SequenceGenerator([model], words, no_repeat_ngram_size=2),
    "units that are not written": lambda model, words: SequenceGenerator([model], words, tokens_to_suppress=[words[5]]),
    "a language model beside it": lambda model, words: SequenceGenerator([model], words, lm_model=small_lm()),
    "a beam as wide as the vocabulary": lambda model, words: SequenceGenerator([model], words, beam_size=len(words)),
    "an adaptive softmax": lambda _, words: SequenceGenerator([adaptive()], words, beam_size=2),
    "half precision": lambda _, words: SequenceGenerator([small_model().bfloat16()], words, beam_size=2),
    "an end far behind in the vocabulary": lambda model, words: SequenceGenerator(
        [model], words, beam_size=2, eos=beam_search.MOST_NAMED
    ),
}


@pytest.mark.parametrize("why", READS_ALL)
def test_what_fairseqs_loop_searches(models, words, why: str) -> None:
    assert not beam_search.serves(READS_ALL[why](models["m4"], words), sources_of(1, 4))


def test_of_the_call(models, words, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix, constraints, no tokens of a source, autocast, no compiler."""
    generator, sample = SequenceGenerator([models["m4"]], words, beam_size=2), sources_of(1, 4)
    assert beam_search.serves(generator, sample)
    assert not beam_search.serves(generator, sample, torch.zeros(1, 1))
    assert not beam_search.serves(generator, sample, None, torch.zeros(1, 1))
    assert not beam_search.serves(generator, {"net_input": {"source": torch.zeros(1, 9)}})
    with torch.autocast("cpu"):
        assert not beam_search.serves(generator, sample)
    monkeypatch.setattr(beam_search.kernel, "serves", lambda logits: False)
    assert not beam_search.serves(generator, sample)


def test_a_model_with_probabilities_of_its_own_is_fairseqs(words) -> None:
    model = small_model()

    class Other(type(model)):
        def get_normalized_probs(self, *given, **more):
            return super().get_normalized_probs(*given, **more).roll(3, -1)

    generator, sample = SequenceGenerator([model], words), sources_of(1, 4)
    assert beam_search.serves(generator, sample)
    model.__class__ = Other
    assert not beam_search.serves(generator, sample)
    generator.model.__class__ = type("Ours", (EnsembleModel,), {})
    model.__class__ = Other.__base__
    assert not beam_search.serves(generator, sample)
