"""ONNX graphs: onnxruntime computes what our models compute, at sizes that were not traced."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

import onnx as onnx_format
import pytest
import torch

from cases import randomize
from helpers import FULL, roberta
from helpers.lm_models import RELATIVE, small_lm, small_xl
from helpers.models import small_config, small_model, small_task
from relpos_fairseq.core.scheme import AttentionShape, SchemeOptions
from relpos_fairseq.export import model_adapters, onnx
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.models.building import Rows
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel
from relpos_fairseq.schemes import REGISTER, scheme_class, scheme_names

TWO_SIDED = [name for name in scheme_names() if not REGISTER[name].causal_only]
SIDES = ("encoder_layers", "decoder_layers")


def build(kind: str, scheme: str, **values) -> torch.nn.Module:
    """A model in fp32 of one layer, or a layer a scheme; every table far from neutral."""
    torch.manual_seed(1)
    layers = scheme.count("/") + 1
    if kind == "roberta":
        task = roberta.small_task(longest=64)
        model = roberta.small_roberta(task=task, position_scheme=scheme, encoder_layers=layers, **values)
        model.register_classification_head("pairs", num_classes=3)
        model.register_question_answering_head("answers")
        model.register_token_classification_head("entities", num_classes=5)
    elif kind == "translation":
        model = small_model(position_scheme=scheme, **dict.fromkeys(SIDES, layers), **values)
    else:
        make = partial(small_xl, mem_len=6) if kind == "xl" else small_lm
        model = make(position_scheme=scheme, decoder_layers=layers, **values)
    for name, module in model.named_modules():
        if name.endswith((".position", ".positions")):
            randomize(module, len(name))
    return model.float().eval()


@torch.no_grad()
def difference(model, folder) -> float:
    """Largest difference of an output of onnxruntime's."""
    kind = model_adapters.adapter_of(model)
    runs = {}
    for graph in kind.graphs():
        onnx.write(graph, folder / f"{graph.name}.onnx")
        onnx_format.checker.check_model(str(folder / f"{graph.name}.onnx"))
        runs[graph.name] = onnx.runner(folder / f"{graph.name}.onnx")
    largest, _, text = onnx.compare(kind, runs)
    assert "1 x 1" in text and "5 x 19" in text
    return largest


# Writing a graph takes seconds, and one more scheme in it little: in hybrids each scheme is in a
# graph of whole texts, of a step and of a step with memory, and options are in the graphs of
# hybrids.  RELPOS_ONNX=full writes them all for every kind of model, and each scheme alone; without
# it each kind but translation, which is among OPTIONS, has one (tests/nn exports every scheme).
TAKEN = {"roberta": TWO_SIDED, "lm": scheme_names(), "xl": RELATIVE, "translation": TWO_SIDED}
SEGMENTS = {"segment_encoding": "head"}
HYBRIDS: dict[str, dict[str, dict]] = {
    "rope+shaw+m1": {},
    "learned+m4m+rel_scalar+alibi_learned+kerple+fox": {"lm": {"adaptive_softmax_cutoff": "8,16"}},
    "sinusoidal+m3+transformer_xl+alibi+sandwich+cope": {"xl": {"same_length": True}},
    "deberta+tupe+shaw_keys+m2+fire+xpos": {},
    "sentence+tupe_a+abs_scalar+tupe_released+m4+t5": {"roberta": SEGMENTS | {"position_reset_cls": "on"}},
    "deberta_released+pope+transformer_xl_learned+log_cpb+cable": {},
}
HYBRIDS |= {name: {} for name in scheme_names() if name not in ["none", *"+".join(HYBRIDS).split("+")]}
SCALES = {"deberta": "2", "sentence": "3", "deberta_released": "3"}  # where members' differ
BRIEFLY = {
    "roberta": "sentence+tupe_a+abs_scalar+tupe_released+m4+t5",
    "lm": "learned+m4m+rel_scalar+alibi_learned+kerple+fox",
    "xl": "sinusoidal+m3+transformer_xl+alibi+sandwich+cope",
}
OPTIONS = [
    ("roberta", "m4/none", {"segment_encoding": "input", "num_segments": "3"}),
    ("xl", "none", {"window_positions": "first"}),
    ("translation", "learned+rope/learned", {"encoder_skips_end": True}),
    ("lm", "m4/none/t5", {"position_random_range": "64"}),  # which training alone draws from
]
OPTIONS += [
    ("xl", "none", {"window_positions": "every"}),
    ("lm", "rope+shaw+m1/none/pope", {}),  # layers that keep different things of a token, and other shapes
] * FULL


def graphs(full: bool = FULL) -> Iterator[tuple[str, str, dict]]:
    """Kind, scheme and options of every model whose graphs are run."""
    yield from OPTIONS
    for kind, taken in TAKEN.items():
        if full:
            yield from ((kind, name, {}) for name in taken)
        for hybrid, options in HYBRIDS.items():
            if not full and hybrid != BRIEFLY.get(kind):
                continue
            if part := "+".join(name for name in hybrid.split("+") if name in taken):
                scale = SCALES.get(hybrid.partition("+")[0])
                values = {"position_scale": scale} if scale else {}
                yield kind, part, values | options.get(kind, {})


def test_every_scheme_meets_every_kind():
    met = {(kind, name) for kind, s, _ in graphs(full=True) for p in s.split("/") for name in p.split("+")}
    assert met >= {(k, n) for k, taken in TAKEN.items() for n in taken}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheme", "values"), list(graphs()))
def test_every_scheme(kind, scheme, values, tmp_path):
    assert difference(build(kind, scheme, **values), tmp_path) < 2e-5


def test_torch_export_takes_any_size():
    """Without ONNX: the program is the model at other sizes, and on either side of padding."""
    model = build("roberta", "m4+tupe", position_scale="2")
    graph = model_adapters.adapter_of(model).graphs()[0]
    program = graph.exported().module()
    tokens = roberta.tokens(4, 23)
    for one in (tokens, tokens.flip(1), tokens[:1, :2]):
        real = one != 1
        with torch.no_grad():
            ours, theirs = graph.module(one)[1], program(one)[1]
        torch.testing.assert_close(theirs[real], ours[real], rtol=0, atol=1e-5)


@torch.no_grad()
def test_adaptive_embeddings_are_one_table_in_a_graph():
    """Which part has a token is a question that no graph can ask."""
    cutoffs = {"adaptive_softmax_cutoff": "8,16", "adaptive_input_cutoff": "8,16"}
    model = build("lm", "m4", adaptive_input=True, share_decoder_input_output_embed=False, **cutoffs)
    tokens = torch.arange(4, 24).view(2, 10)
    before = model(tokens)[0]
    onnx.embed_plainly(model)
    assert isinstance(model.decoder.embed_tokens, torch.nn.Embedding)
    torch.testing.assert_close(model(tokens)[0], before)
    graph = model_adapters.adapter_of(model).graphs()[0]
    assert graph.exported().module()(*graph.inputs.values()) is not None


def test_a_skipped_end_in_a_graph():
    """A source that is </s> alone keeps it, beside those that lose theirs."""
    model = build("translation", "shaw", encoder_skips_end=True)
    graph = model_adapters.adapter_of(model).graphs()[0]
    sources = torch.tensor([[1, 1, 5, 6, 2], [1, 1, 1, 1, 2], [1, 7, 8, 9, 2]])
    with torch.no_grad():
        ours, theirs = graph.module(sources), graph.exported().module()(sources)
    kept = dict(zip(model_adapters.Encoder.OUTPUTS, ours, strict=True))
    assert not kept["source_padding"].all(1).any()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


def test_jit_says_what_to_call_instead():
    model = build("roberta", "m4")
    with pytest.raises(RuntimeError, match="call torch.export.export"):
        torch.jit.trace(lambda tokens: model(tokens)[0], roberta.tokens(), check_trace=False)


@torch.no_grad()
def test_closed_gates_are_the_same_in_a_graph(tmp_path):
    """A small sigmoid of onnxruntime has few digits, and its logarithm fewer."""
    scheme = scheme_class("fox").built(AttentionShape(1, 1, 8), SchemeOptions())
    scheme.gate_weight.fill_(1)

    class Gates(torch.nn.Module):
        def forward(self, x):
            return scheme.log_gates(x)

    x = torch.linspace(-40, 40, 161)[:, None, None]
    sizes = {"x": {0: model_adapters.free("length")}}
    graph = onnx.Graph("gates", Gates(), {"x": x[:7]}, sizes, ("log_gates",))
    onnx.write(graph, tmp_path / "gates.onnx")
    [found] = onnx.runner(tmp_path / "gates.onnx")(x=x)
    expected = scheme.double().log_gates(x.double())
    assert abs(torch.from_numpy(found) - expected).max() < 2e-6


@torch.no_grad()
def test_a_source_has_a_dictionary_of_its_own(tmp_path):
    """Sources are drawn from the encoder's rows, of which there may be fewer."""
    task = small_task()
    task.source_dictionary = Rows(9)
    model = RelPosTransformerModel.build_model(small_config(position_scheme="none"), task).eval()
    kind = model_adapters.adapter_of(model)
    assert kind.facts()["source_vocabulary"] == 9 and kind.facts()["vocabulary"] > 9
    assert int(kind.padded(3, 50).max()) == 8
    assert len(kind.graphs()) == 2


def test_t5s_buckets_are_the_same_in_a_graph(monkeypatch):
    from relpos_fairseq.core import relations

    distance = torch.arange(-300, 301)
    for both in (True, False):
        for size, reach in ((32, 128), (6, 9), (10, 300), (64, 77)):
            relation = relations.Bucketed(size, reach, both)
            eager = relation.of_distance(distance)
            with monkeypatch.context() as patch:
                patch.setattr(relations, "is_exported", lambda: True)
                assert torch.equal(relation.of_distance(distance), eager), (size, reach, both)


def test_other_models_are_refused():
    with pytest.raises(UserError, match="a Linear has no graphs"):
        model_adapters.adapter_of(torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="without memory"):
        model_adapters.adapter_of(build("xl", "m4", eval_mem_len=0)).graphs()


@pytest.mark.slow
def test_the_command(briefly, ways, monkeypatch):
    def export(out, *more, status=0):
        return ways.run("export", "onnx", checkpoint, "--out", ways / out, *more, status=status)

    checkpoint, out = briefly("--position-scheme", "m4m"), ways / "graphs"
    assert "largest difference" in export("graphs")
    facts = read_json(out / onnx.REPORT)
    assert facts["graphs"]["step.onnx"]["inputs"]["tokens"] == ["batch", "past + 1"]
    assert facts["positions"].startswith("m4m ")
    assert facts["comparison"]["largest_difference"] < 1e-4
    card = (out / "MODEL_CARD.md").read_text()
    assert card.startswith("# Model card: ONNX of checkpoint_last.pt\n") and "# The checkpoint" in card
    assert "| encoder.onnx, step.onnx" in card and facts["checkpoint"]["sha256"] in card
    assert "comparison: largest_difference" in card and "| encoder_positions" in card
    monkeypatch.setattr(onnx, "write", lambda graph, path: shutil.copy(out / path.name, path))  # the same graphs
    said = export("int8", "--quantization", "int8")
    assert read_json(ways / "int8" / onnx.REPORT)["comparison"]["weights"] == "int8"
    sizes = [sum(path.stat().st_size for path in folder.glob("*.onnx*")) for folder in (out, ways / "int8")]
    assert sizes[1] < sizes[0] and "in int8: rows x tokens" in said
    monkeypatch.setattr(onnx, "QUANTIZED", 0.0)
    assert "in int8 logits differ by" in export("no", "--quantization", "int8", status=2)
    monkeypatch.setattr(onnx, "agree", lambda apart, size: False)
    assert "the graphs' logits differ by" in export("no", status=2)
    assert not (ways / "no").exists()
