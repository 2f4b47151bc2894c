"""Exports to CTranslate2: its own engine decodes what our models compute."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
import numpy as np
import pytest
import torch
from fairseq.quantization_utils import quantize_model_scalar
from fairseq.sequence_generator import SequenceGenerator

from helpers.commands import relpos, train
from helpers.formats import change, change_checkpoint, text, without
from helpers.lm_models import randomized
from helpers.models import small_model, small_task
from helpers.twins import ending
from relpos_fairseq.export import ct2
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.lab.benchmarks import serving
from relpos_fairseq.schemes import REGISTER, scheme_names

HELD = "none sinusoidal learned sentence shaw shaw_keys rope t5 rel_scalar alibi sandwich kerple log_cpb".split()
OTHERS = [
    *({"position_scheme": name, "position_share": "both"} for name in ("shaw", "t5", "kerple")),
    {"position_scheme": "t5", "position_share": "none"},
    {"position_scheme": "shaw", "position_clip_distance": "2"},
    {"position_scheme": "rel_scalar", "position_clip_distance": "0"},
    {"position_scheme": "t5", "position_scale": "3"},
    {"position_scheme": "t5", "position_buckets": "6", "position_max_distance": "9"},
    {"position_scheme": "t5+kerple"},
    {"position_scheme": "alibi_learned", "position_alibi_form": "symmetric"},
    {"position_scheme": "rope", "position_rope_pairs": "halves", "position_rope_base": "500"},
    {"position_scheme": "rope", "position_rope_scaling": "linear", "position_rope_factor": "3"},
    {"position_scheme": "rope+rel_scalar"},
    {"encoder_position_scheme": "t5", "decoder_position_scheme": "rope"},
    {"encoder_position_scheme": "learned", "decoder_position_scheme": "shaw_keys"},
    {"position_scheme": "shaw", "encoder_normalize_before": True, "decoder_normalize_before": True}
    | {"layernorm_embedding": True, "activation_fn": "gelu"},
    {"position_scheme": "kerple", "encoder_embed_dim": 24, "encoder_attention_heads": 4},
]
REFUSED = [
    ("m1", {}, "gate"),
    ("m4", {}, "key_vectors"),
    ("m4m", {}, "key_vectors"),
    ("tupe", {}, "static_factors"),
    ("transformer_xl", {}, "query_offset"),
    ("learned+t5", {}, "input"),
    ("rope+shaw", {}, "vectors beside a rotation"),
    ("shaw+rel_scalar", {}, "vectors beside a bias"),
    ("none/t5", {}, "a bias in some of its layers"),
    ("shaw", {"position_share": "none"}, "query_vectors of each head"),
    ("rope", {"encoder_embed_dim": 10, "decoder_embed_dim": 10}, "channels that are not rotated"),
    ("none", {"no_cross_attention": True}, "no cross-attention"),
    ("none", {"quant_noise_pq": 0.1}, "a projection of its embeddings, of --quant-noise-pq"),
]


def trained(**values):
    """A small model whose tables and biases are far from where they start."""
    model = small_model(**values)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def written(model, folder):
    """What an engine reads, the model's words, and the limits that the folder names."""
    words = small_task().source_dictionary
    limits = ct2.write(model, words, words, folder, None)
    return ctranslate2.Translator(str(folder), intra_threads=1), words, limits


def difference(model, folder, lengths=(1, 3, 40)) -> float:
    """Largest difference of logits; the lengths lie on both sides of tables' ends."""
    engine, words, _ = written(model, folder)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(4, len(words), (n,), generator=generator) for n in lengths]
    rows = [torch.cat([row, torch.tensor([2])]) for row in rows]
    largest, _, steps = ct2.compare_logits(engine, model, words, words, rows)
    assert steps >= ct2.LEAST_STEPS * len(lengths)
    return largest


@pytest.mark.parametrize("values", [{"position_scheme": name} for name in HELD] + OTHERS, ids=str)
def test_logits_are_the_models(values, tmp_path):
    assert difference(trained(**values), tmp_path) < 2e-5


@pytest.mark.parametrize("name", ["rope", "shaw", "t5", "learned"])
def test_a_scheme_without_a_table_takes_sources_of_any_length(name, tmp_path):
    """Only a table of positions limits what the folder says that it takes."""
    *_, limits = written(trained(position_scheme=name), tmp_path)
    assert limits == (ct2.Limits(1024, 1024) if name == "learned" else ct2.Limits(None, None))


def test_a_validation_set_of_longer_sentences_gives_random_ones():
    task = small_task()
    task.load_dataset, task.dataset = (lambda split: None), (lambda split: [{"source": torch.arange(30)}])
    assert ct2.validation_sentences(task, 5, None)[1] == "1 sentences of the validation set"
    rows, said = ct2.validation_sentences(task, 5, 12)
    assert said == "5 random sentences" and max(map(len, rows)) <= 12


@pytest.mark.parametrize("name", ["learned", "sentence", "none"])
def test_a_search_ends_where_the_decoders_table_ends(name, tmp_path):
    """A model that hardly says </s>, with 16 positions; those without a table of their own go on, as fairseq's does."""
    model, task = trained(position_scheme=name, max_source_positions=16, max_target_positions=16), small_task()
    with torch.no_grad():
        model.decoder.output_projection.weight[2] = 0
    engine, words, limits = written(model, tmp_path)
    assert limits == (ct2.Limits(1024, 1024) if name == "none" else ct2.Limits(16, 16))
    rows = [torch.tensor([5, 6, 7, 2]), torch.tensor([9, 2])]
    found = ct2.best_of(engine, [[words[n] for n in row[:-1]] for row in rows], limits.target)
    assert found == ct2.translate(model, task, rows)
    assert max(map(len, found)) >= (16 if name == "none" else 15)
    assert ct2.compare_logits(engine, model, words, words, rows, limits.target)[0] < 2e-5


def test_a_prefix_is_searched_as_the_readme_says(tmp_path):
    """The engine's scores leave out the prefix, and it ends a sentence at once only where </s> is the best symbol."""
    model = ending(randomized(small_model(seed=2, position_scheme="shaw"))).float()
    (engine, words, _), draw = written(model, tmp_path), torch.Generator().manual_seed(1)
    given = {"beam_size": 4, "num_hypotheses": 4, "return_scores": True, "suppress_sequences": [["<blank>"]]}
    given |= {"length_penalty": 0, "max_decoding_length": 30}
    search = SequenceGenerator([model], words, beam_size=4, max_len_b=30, normalize_scores=False)
    alike = 0
    for _ in range(12):
        source, prefix = torch.randint(4, 24, (1, 8), generator=draw), torch.randint(4, 24, (1, 3), generator=draw)
        tokens = torch.cat([source, torch.tensor([[2]])], dim=1)
        net_input = {"src_tokens": tokens, "src_lengths": torch.tensor([9])}
        ours = search.generate([model], {"net_input": net_input}, prefix_tokens=prefix)[0]
        names = [[[words[n] for n in row.tolist()]] for row in (source[0], prefix[0])]
        theirs = engine.translate_batch(names[0], target_prefix=names[1], **given)[0]
        mine = [([words[n] for n in one["tokens"][:-1]], float(one["positional_scores"][3:].sum())) for one in ours]
        if len(theirs.hypotheses[0]) > 3 and len(mine[0][0]) == 3:
            del mine[0]
        assert mine[0][0] == theirs.hypotheses[0] and mine[0][1] == pytest.approx(theirs.scores[0], rel=0.1)
        alike += len(mine) == 4
    assert 6 <= alike < 12


def test_long_sources_are_read_whole(tmp_path):
    """The engine itself would cut them at 1,024."""
    assert difference(trained(position_scheme="shaw"), tmp_path, lengths=(1100,)) < 2e-5


@pytest.mark.parametrize("name", sorted(set(scheme_names()) - set(HELD)))
def test_what_is_not_held_is_refused(name, tmp_path):
    """Every other scheme is refused by name, with the way out, or it is exported rightly."""
    side = "decoder_" if REGISTER[name].causal_only else ""
    values = {"encoder_position_scheme": "none"} if side else {}
    try:
        model = trained(**values | {f"{side}position_scheme": name})
        assert difference(model, tmp_path) < 2e-5
    except UserError as error:
        assert f"position scheme {name}: it has " in str(error)
        assert "relpos export onnx" in str(error)


@pytest.mark.parametrize(("scheme", "values", "said"), REFUSED)
def test_the_reason_is_named(scheme, values, said, tmp_path):
    with pytest.raises(UserError, match=said):
        difference(trained(position_scheme=scheme, **values), tmp_path)


def test_other_parts_are_refused(tmp_path):
    rounding = quantize_model_scalar(trained(position_scheme="none"), SimpleNamespace(quant_noise_scalar=0.1))
    with pytest.raises(UserError, match="that it rounds, of --quant-noise-scalar"):
        difference(rounding, tmp_path)
    with pytest.raises(UserError, match="no relpos_transformer"):
        ct2.write(SimpleNamespace(decoder=None), None, None, tmp_path, None)


def test_an_absent_or_old_package_names_the_extra(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ctranslate2", None)
        with pytest.raises(UserError, match=re.escape("pip install 'relpos_fairseq[ct2]'")):
            ct2.engine()
    monkeypatch.setattr(ctranslate2, "__version__", "4.8.2")
    with pytest.raises(UserError, match="4.8.2 is too old, 4.8.3 or newer"):
        ct2.engine()


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    train(corpus, folder, "--position-scheme", "shaw", "--max-update", "20")
    return folder / "checkpoint_last.pt"


def export(ways, checkpoint, *more, status=0):
    """Run `relpos export ct2`."""
    return ways.run("export", "ct2", checkpoint, "--out", ways / "served", *more, status=status)


def test_the_command_compares_what_it_wrote(checkpoint, ways):
    out, printed = ways / "served", export(ways, checkpoint)
    assert "29 sentences of the validation set" in printed
    assert "29 of 29 translations (beam 4) are equal, BLEU of one against the other 100.00" in printed
    facts = read_json(out / ct2.REPORT)
    assert facts["comparison"]["logits"] < 1e-5
    assert facts["positions"]["decoder"].startswith("shaw ") and facts["longest"] is None
    translator = ctranslate2.Translator(str(out), intra_threads=1)
    assert translator.translate_batch([["w1", "w2"]])[0].hypotheses[0]
    assert f"{out} exists" in export(ways, checkpoint, status=2)


def test_translate_runs_an_export(checkpoint, corpus, ways):
    """The same lines, texts and scores as the checkpoint's, n-best and empty lines included."""
    out = ways / "served"
    export(ways, checkpoint)
    lines = ["", *corpus.lines("test", "src")[:9]]
    (ways / "in.txt").write_text("\n".join(lines) + "\n")
    options = [ways / "in.txt", "--nbest", "2", "--max-len-b", "14", "--jsonl", "--cpu"]
    found = [ways.lines("translate", model, *options) for model in (checkpoint, out)]
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert (ours["line"], ours["source"]) == (theirs["line"], theirs["source"])
        pairs = list(zip(ours["hypotheses"], theirs["hypotheses"], strict=True))
        for one, other in pairs:
            assert one["text"] == other["text"]
            # The engine's softmax leaves out what may not be chosen, so its scores are higher.
            assert one["score"] < other["score"] < 0.9 * one["score"]
    assert len(pairs) == 2 and found[0][0] == found[1][0]  # the empty line
    card = (out / "MODEL_CARD.md").read_text()
    assert "comparison: logits" in card and "# The checkpoint" in card
    said = ways.run("translate", out, ways / "in.txt", "--unkpen", "1", status=2)
    assert "--unkpen 1.0: CTranslate2 has none; leave it out" in said
    (out / ct2.REPORT).unlink()
    assert "export the checkpoint again" in ways.run("translate", out, ways / "in.txt", status=2)


@pytest.fixture(scope="module")
def served(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "folder"
    assert relpos("export", "ct2", checkpoint, "--out", folder) == 0
    return folder


def unhashed(folder: Path) -> None:
    """An export from before hashes, which the engine alone can judge."""
    change(folder / ct2.REPORT, files={})
    (folder / "config.json").write_text("[]")


DAMAGED = {
    "model.bin is not the file that was exported": text("model.bin", "\x06"),
    "config.json is not the file that was exported": text("config.json", "[]"),
    "text/dict.src.txt is not the file that was exported": without("text/dict.src.txt"),
    "longest is -3, and must be a whole number": text(ct2.REPORT, '{"languages": ["en", "de"], "longest": -3}'),
    "is not a whole folder of CTranslate2": unhashed,
}


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_export_is_one_line(served, ways, said):
    shutil.copytree(served, ways / "served")
    DAMAGED[said](ways / "served")
    printed = ways.run("translate", ways / "served", ways / "served" / ct2.REPORT, "--cpu", status=2)
    error = printed.strip().splitlines()[-1]
    assert error.startswith(f"error: {ways / 'served'}") and said in error and "export the checkpoint ag" in error


def test_text_beside_the_checkpoint_is_enough(checkpoint, corpus, ways):
    """Without the data: random sentences are compared, and the export has its dictionaries."""
    shutil.copy(checkpoint, ways / "model.pt")
    change_checkpoint(ways / "model.pt", lambda state: state["cfg"]["task"].update(data=str(ways / "gone")))
    said = export(ways, ways / "model.pt", status=2)
    assert "no text/ beside" in said and "gone" in said and not (ways / "served").exists()
    shutil.copytree(checkpoint.parent / "text", ways / "text")
    assert "32 random sentences" in export(ways, ways / "model.pt")
    for name in ("dict.src.txt", "dict.tgt.txt"):
        assert (corpus.binary / name).read_bytes() == (ways / "served/text" / name).read_bytes()


def test_quantized_weights_are_smaller(checkpoint, served, ways):
    assert "int8: 29 sentences" in export(ways, checkpoint, "--quantization", "int8")
    sizes = [(folder / "model.bin").stat().st_size for folder in (served, ways / "served")]
    assert sizes[1] < 0.6 * sizes[0]
    assert read_json(ways / "served" / ct2.REPORT)["comparison"]["logits"] > 1e-5


def test_an_engine_that_differs_writes_nothing(checkpoint, ways, monkeypatch):
    fused = ct2.transformer_spec

    def wrong(*args):
        spec = fused(*args)
        attention = spec.encoder.layer[1].self_attention
        attention.relative_position_keys = np.roll(attention.relative_position_keys, 3, 0) * 30
        return spec

    monkeypatch.setattr(ct2, "transformer_spec", wrong)
    assert "CTranslate2's logits differ by" in export(ways, checkpoint, status=2)
    assert not (ways / "served").exists()


@pytest.mark.slow
def test_the_benchmark_has_a_row_for_each_search(corpus, checkpoint, capsys, timed_here):
    assert relpos("benchmark", "serving", checkpoint, "--data", corpus.binary, "--rounds", "1") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if re.search(r"^\|.*\d\.\d", line)]
    rows = [row for row in rows if "bf16" not in row]
    bleu = [row.strip(" |").split("|")[-1].strip() for row in rows]
    assert len(rows) == 7 and "relpos translate int8" in rows[2]
    assert ["fairseq's transformer" in rows[5], "Marian" in rows[6]] == [True, True] and bleu[5:] == ["-", "-"]
    assert bleu[0] == bleu[1] == bleu[3]  # the same search of the same model
    assert all(float(row.split("|")[4]) > 50 for row in rows)  # MiB


@pytest.mark.slow
def test_the_benchmark_gives_both_each_batch_in_turns(corpus, checkpoint, capsys, timed_here):
    given = "--data", corpus.binary, "--rounds", "1", "--in-turns", "1,64", "--symbols", "4"
    assert relpos("benchmark", "serving", checkpoint, *given) == 0
    rows = [
        line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines() if re.match(r"\|.*\d\.\d", line)
    ]
    assert [[part.strip() for part in row[:2]] for row in rows] == [
        [kind, size] for kind in ("fp32", "int8") for size in ("1", "64")
    ]
    for row in rows:
        best, median, ours, theirs = map(float, row[2:])
        assert best == median and theirs / ours == pytest.approx(best, rel=0.2)


def test_what_is_timed_has_a_process_of_its_own():
    assert serving.run_apart(os.getpid) != os.getpid()
