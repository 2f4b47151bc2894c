"""The search for one sentence's translations finds what fairseq's finds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given, settings
from hypothesis import strategies as st
from inference.test_narrow_search import OPTIONS, assert_alike, wide

from helpers.lm_models import randomized, small_lm, stream
from helpers.models import small_model, small_task
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.search import Search
from relpos_fairseq.inference.checkpoints import hooks, sentence_search
from relpos_fairseq.nn.packed import prepare
from relpos_fairseq.schemes import scheme_class, scheme_names

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C compiler")
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


def source_of(seed: int, length: int) -> dict:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.cat([torch.randint(4, 24, (1, length), generator=draw), torch.tensor([[2]])], dim=1)
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([length + 1])}}


def searched(model, words, sample: dict, begin: int | None = None, **options) -> tuple[list, list]:
    """What the search for one sentence finds, and what fairseq's does."""
    generator = SequenceGenerator([model], words, **options)
    generator.weighs = False
    with counted() as calls:
        found = generator.generate([model], sample, bos_token=begin)
    assert calls
    return found, fairseqs(generator, model, sample, begin)


def fairseqs(generator, model, sample: dict, begin: int | None = None) -> list:
    """What fairseq's search finds, but for attention, which it weighs anyway."""
    with wide():
        found = generator.generate([model], sample, bos_token=begin)
    return [[one | {"attention": torch.empty(0)} for one in row] for row in found]


@contextlib.contextmanager
def counted() -> Iterator[list]:
    """A block whose list has the number of steps of each call of the kernel that evaluates some."""
    steps, original = [], Search._run

    def run(self):
        before = self.step
        done = original(self)
        steps.append(self.step - before if self._call.num_layers else 0)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_run", run)
        yield steps


@settings(max_examples=100, deadline=None)
@given(
    options=OPTIONS,
    name=st.sampled_from(["m4", "t5", "rope", "m4m", "learned+fox"]),
    seed=st.integers(0, 99),
    length=st.integers(1, 9),
    begin=st.sampled_from([None, 5]),
)
def test_fairseqs_own(models, words, options: dict, name: str, seed: int, length: int, begin: int | None) -> None:
    assert_alike(*searched(models[name], words, source_of(seed, length), begin, **options))


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme(scheme: str, words) -> None:
    """Long enough for two changes of the room that decoding has."""
    encoder = {"encoder_position_scheme": "none"} if scheme_class(scheme).causal_only else {}
    model = lively(position_scheme=scheme, **encoder)
    generator = SequenceGenerator([model], words, beam_size=3, max_len_b=70, min_len=68)
    generator.weighs = False
    with counted() as steps:
        found = generator.generate([model], source_of(3, 6))
    if scheme in PREPARED:
        assert steps == [32, 32, 7]
    assert_alike(found, fairseqs(generator, model, source_of(3, 6)), 2e-4)


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
        assert_alike(*searched(model, words, source_of(3, 6), beam_size=3, max_len_b=40, min_len=38), 2e-4)
    assert (max(steps) > 1) is is_whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["m4", "learned"])
def test_shapes(shape: str, scheme: str, words) -> None:
    model = lively(position_scheme=scheme, **SHAPES[shape])
    with counted() as steps:
        assert_alike(*searched(model, words, source_of(1, 5), beam_size=4, max_len_b=12))
    assert max(steps) > 1


@pytest.mark.parametrize("kind", ["int8", "float64", "unpacked"])
def test_other_weights(kind: str, words) -> None:
    model = randomized(small_model(position_scheme="shaw")).to(torch.float64 if kind == "float64" else torch.float32)
    if kind == "int8":
        prepare(model, "int8")
    assert_alike(*searched(model, words, source_of(4, 7), beam_size=4, max_len_b=12))


@pytest.mark.parametrize("scheme", ["none", "shaw", "rope", "alibi"])
def test_a_language_model(scheme: str) -> None:
    """There is no source, and its text may be a prompt that the search begins with."""
    lm = randomized(small_lm(position_scheme=scheme)).float().eval()
    prepare(lm, None)
    found, expected = searched(lm, lm.decoder.dictionary, {"net_input": {"src_tokens": stream(1, 4)}}, max_len_b=40)
    assert_alike(found, expected)


def test_a_table_is_read_as_far_as_hypotheses_go(words) -> None:
    """The length of the source, which is theirs here, may be greater than the table's, at whose end they all end."""
    model = lively(position_scheme="learned", max_target_positions=8, encoder_position_scheme="none")
    options = {"beam_size": 2, "match_source_len": True}
    with torch.no_grad():
        model.decoder.layers[1].final_layer_norm.bias.fill_(9)
        model.decoder.output_projection.weight[2].fill_(9)
    assert_alike(*searched(model, words, source_of(4, 12), **options))
    with pytest.raises(ValueError, match="8 positions and the input has 9"):
        searched(model, words, source_of(4, 12), min_len=9, **options)


def test_hypotheses_that_begin_with_padding(models, words) -> None:
    """Fairseq hides their first token."""
    generator = SequenceGenerator([models["m4"]], words, max_len_b=9)
    generator.weighs = False
    found = generator.generate([models["m4"]], source_of(1, 5), bos_token=1)
    assert_alike(found, fairseqs(generator, models["m4"], source_of(1, 5), 1))


@pytest.mark.parametrize("scheme", ["m4", "rope"])
def test_another_default_type(scheme: str, words) -> None:
    model = lively(position_scheme=scheme)
    torch.set_default_dtype(torch.float64)
    try:
        assert_alike(*searched(model, words, source_of(1, 5), max_len_b=9))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("part", ["layers.1", "dropout_module"])
def test_a_hook_sees_every_step(part: str, words) -> None:
    model, seen = lively(position_scheme="m4"), []
    model.decoder.get_submodule(part).register_forward_hook(lambda *given: seen.append(1))
    searched(model, words, source_of(1, 5), beam_size=2, max_len_b=9, min_len=9)
    assert len(seen) == 20


def test_weights_that_change_between_sentences(words) -> None:
    model = lively(position_scheme="m4", share_decoder_input_output_embed=False)
    before, _ = searched(model, words, source_of(1, 5), max_len_b=9)
    with torch.no_grad():
        model.decoder.embed_tokens.weight.mul_(-2)
        model.decoder.layers[0].final_layer_norm.bias.add_(3)
    found, expected = searched(model, words, source_of(1, 5), max_len_b=9)
    assert_alike(found, expected)
    assert found[0][0]["positional_scores"].tolist() != before[0][0]["positional_scores"].tolist()


def test_a_model_that_finds_no_numbers(words) -> None:
    """Fairseq ends in an assertion too."""
    model = lively(position_scheme="m4")
    with torch.no_grad():
        model.decoder.layers[1].final_layer_norm.weight.fill_(float("nan"))
    generator = SequenceGenerator([model], words, max_len_b=9)
    generator.weighs = False
    with pytest.raises(AssertionError, match="within 9 units: the model finds no numbers"):
        generator.generate([model], source_of(1, 5))
    with wide(), pytest.raises(AssertionError):
        generator.generate([model], source_of(1, 5))


def test_who_is_served(models, words) -> None:
    """Nobody reads the attention of one sentence without constraints."""
    generator = SequenceGenerator([models["m4"]], words)
    one, two = source_of(1, 4), {"net_input": {"src_tokens": source_of(1, 4)["net_input"]["src_tokens"].expand(2, -1)}}
    narrow = hooks.narrowed(generator, None)
    assert not sentence_search.serves(narrow, one, None)
    generator.weighs = False
    narrow = hooks.narrowed(generator, None)
    assert sentence_search.serves(narrow, one, None)
    assert not sentence_search.serves(narrow, two, None)
    assert not sentence_search.serves(narrow, one, torch.zeros(1, 1))
    assert not sentence_search.serves(generator, one, None)
    assert not sentence_search.serves(narrow, {"net_input": {"source": torch.zeros(1, 9)}}, None)
