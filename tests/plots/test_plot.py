"""`relpos plot` writes what the checkpoint holds; its errors are one line."""

from __future__ import annotations

import csv
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data.dictionary import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from matplotlib import pyplot as plt
from omegaconf import OmegaConf

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import AttentionShape
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.plots import axes
from relpos_fairseq.plots import checkpoint as distances
from relpos_fairseq.plots import logits as plot_logits
from relpos_fairseq.plots import stacks as plot_sentence
from relpos_fairseq.plots.stacks import Stack

WORDS = "the cat sat on a mat and saw $5 or $6".split()
SENTENCE = "the cat saw a mat".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data-bin folder with dictionaries and two test sentences."""
    folder = tmp_path_factory.mktemp("bin")
    dictionary = Dictionary()
    for word in WORDS:
        dictionary.add_symbol(word)
    for side in ("en", "de"):
        dictionary.save(str(folder / f"dict.{side}.txt"))
        builder = MMapIndexedDatasetBuilder(str(folder / f"test.en-de.{side}.bin"))
        for line in (" ".join(SENTENCE), "a mat sat"):
            builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
        builder.finalize(str(folder / f"test.en-de.{side}.idx"))
    return folder


@pytest.fixture(scope="module")
def save(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a checkpoint in fairseq's format, with parameters drawn at random."""

    def make(scheme: str, *flags: str) -> Path:
        named = ("--arch", "relpos_transformer_tiny", "--position-scheme", scheme)
        given = [str(data), *named, "--optimizer", "adam", "--cpu", *flags]
        args: Namespace = options.parse_args_and_arch(options.get_training_parser(), given)
        config = convert_namespace_to_omegaconf(args)
        model = tasks.setup_task(config.task).build_model(config.model)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "position" in name:
                    parameter.normal_()
        cfg = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
        rest = {"optimizer_history": [{"optimizer_name": "a", "lr_scheduler_state": {}, "num_updates": 1}]}
        rest |= {"extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}, "task_state": {}}
        path = tmp_path_factory.mktemp("checkpoint") / "checkpoint.pt"
        torch.save({"cfg": cfg, "args": None, "model": model.state_dict(), **rest}, path)
        return path

    return make


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty figures: where only numbers are looked at, drawing would take most of the time."""
    monkeypatch.setattr(axes, "draw_picture", lambda _: axes.plt.figure(figsize=(1, 1)))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: list[dict[str, str]], prefix: str) -> torch.Tensor:
    """The columns that begin with `prefix`, NaN where a cell is empty."""
    values = [[float(v or "nan") for k, v in row.items() if k.startswith(prefix)] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["model"]


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def stems(folder: Path) -> set[str]:
    """Names that have a PNG and a CSV; nothing else may lie in the folder."""
    names = {path.stem for path in folder.glob("[!.]*")}
    assert {p.name for p in folder.glob("[!.]*")} == {f"{n}.{s}" for n in names for s in ("png", "csv")}
    for name in names:
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    return names


def test_scalars_logits_and_attention_of_rel_scalar(save, tmp_path, undrawn, shell):
    checkpoint, out = save("rel_scalar", "--position-clip-distance", "3"), tmp_path / "out"
    printed = shell(f"plot {checkpoint} --data <data> --out out")
    each = ("static", "position-logits", "attention", "ranks")
    assert stems(out) == {f"{side}-{kind}" for side in ("encoder", "decoder") for kind in each}
    assert "attention and ranks on: first sentence of test" in printed
    assert "skipped (encoder, rel_scalar): vectors over distance: no term has any" in printed
    assert "wrote 16 files" in printed

    model = weights(checkpoint)
    name = "{}.layers.{}.self_attn.position.0.bias_table"
    tables = {side: [model[name.format(side, i)] for i in (0, 1)] for side in ("encoder", "decoder")}
    found = read(out / "encoder-static.csv")
    assert list(found[0])[2:] == [f"distance_{d}" for d in range(-3, 4)]
    assert [(r["layer"], r["head"]) for r in found[3:5]] == [("1", "4"), ("2", "1")]
    same(numbers(found, "distance_"), torch.cat(tables["encoder"]))
    causal = read(out / "decoder-static.csv")
    same(numbers(causal, "distance_"), torch.cat(tables["decoder"])[:, :4])

    distance = torch.arange(32)[None, :] - torch.arange(32)[:, None]
    ids = distance.clamp(-3, 3) + 3
    logits = numbers(read(out / "encoder-position-logits.csv"), "key_").view(2, 4, 32, 32)
    same(logits, torch.stack([table[:, ids] for table in tables["encoder"]]))
    logits = numbers(read(out / "decoder-position-logits.csv"), "key_").view(2, 4, 32, 32)
    expected = torch.stack([table[:, ids] for table in tables["decoder"]])
    same(logits, expected.masked_fill(distance > 0, float("nan")))

    for side, tokens in (("encoder", [*SENTENCE, "</s>"]), ("decoder", ["</s>", *SENTENCE])):
        rows = read(out / f"{side}-attention.csv")
        assert [row["token"] for row in rows] == tokens * 2
        probs = numbers(rows, "key_")
        same(probs.nansum(-1), torch.ones(12))
        assert (probs.isnan().sum(-1).tolist() == [5, 4, 3, 2, 1, 0] * 2) == (side == "decoder")


VECTORS = {"shaw": {"query_vectors": "key_table", "value_vectors": "value_table"}}
VECTORS |= {"m3": {"trilinear": "trilinear_table"}, "learned+m4": {"vectors": "table"}}


@pytest.mark.parametrize(("scheme", "fields"), VECTORS.items())
def test_vector_tables(save, tmp_path, undrawn, scheme, fields, shell):
    checkpoint = save(scheme, "--position-clip-distance", "4", "--position-share", "none")
    shell(f"plot {checkpoint} --out . --distance 3")
    model = weights(checkpoint)
    for field, tensor in fields.items():
        names = (f"encoder.layers.{i}.self_attn.position.0.{tensor}" for i in (0, 1))
        tables = [model[name][:, 1:8] for name in names]
        channels = read(tmp_path / f"encoder-{field}-channels.csv")
        assert [row["head"] for row in channels[::32]] == list("1234") * 2
        each = [head.t() for table in tables for head in table]
        same(numbers(channels, "distance_"), torch.cat(each))
        norms = numbers(read(tmp_path / f"encoder-{field}-norm.csv"), "distance_")
        same(norms, torch.cat(tables).norm(dim=-1))
    kinds = {stem.split("-")[1] for stem in stems(tmp_path) if stem.endswith("norm")}
    assert kinds == set(fields)


def test_absolute_tables_and_their_logits(save, tmp_path, undrawn, shell):
    checkpoint = save("learned+abs_scalar", "--max-source-positions", "9", "--decoder-layers", "1")
    assert "synthetic tokens" in shell(f"plot {checkpoint} --out .")
    model = weights(checkpoint)
    table = model["encoder.positions.shared.0.table"].double()
    unit = table / table.norm(dim=-1, keepdim=True)
    cosine = numbers(read(tmp_path / "encoder-learned-position-cosine.csv"), "position_")
    same(cosine, unit @ unit.t())

    factors = [model[f"encoder.layers.{i}.self_attn.position.0.position_table"].double() for i in (0, 1)]
    found = numbers(read(tmp_path / "encoder-position-logits.csv"), "key_").view(2, 4, 9, 9)
    same(found, torch.stack([p @ p.transpose(-1, -2) for p in factors]))
    unit = torch.nn.functional.normalize(torch.stack(factors), dim=-1)
    found = numbers(read(tmp_path / "encoder-query-factor-cosine.csv"), "position_")
    same(found.view(2, 4, 9, 9), unit @ unit.transpose(-1, -2))
    assert not (tmp_path / "encoder-key-factor-cosine.csv").exists()

    q, k = ((table @ model[f"encoder.layers.0.self_attn.{n}_proj.weight"].double().t()).view(9, 4, 32) for n in "qk")
    found = numbers(read(tmp_path / "encoder-input-logits.csv"), "key_").view(4, 9, 9)
    same(found, torch.einsum("ihd,jhd->hij", q, k) / 32**0.5)


def test_layers_of_different_schemes(save, tmp_path, undrawn, shell):
    checkpoint = save("t5/rope+rel_scalar")
    shell(f"plot {checkpoint} --out . --length 5")
    rows = read(tmp_path / "encoder-static.csv")
    assert [row["layer"] for row in rows] == ["1"] * 4 + ["2"] * 4
    table = weights(checkpoint)["encoder.positions.shared.0.bias_table"] / 32**0.5
    same(torch.tensor([float(row["distance_-1"]) for row in rows[:4]]).double(), table[:, 1])
    logits = numbers(read(tmp_path / "encoder-position-logits.csv"), "key_").view(2, 4, 5, 5)
    own = weights(checkpoint)["encoder.layers.1.self_attn.position.0.bias_table"]
    same(logits[0, :, 3, 2], table[:, 1])
    same(logits[1, :, 3, 2], own[:, 128 - 1])


def test_what_layers_share_is_drawn_once(save, tmp_path, undrawn, shell):
    checkpoint = save("t5", "--position-buckets", "8", "--position-max-distance", "20")
    shell(f"plot {checkpoint} --out . --length 5")
    rows = read(tmp_path / "encoder-static.csv")
    assert [(row["layer"], row["head"]) for row in rows] == [("all", str(h)) for h in range(1, 5)]
    table = weights(checkpoint)["encoder.positions.shared.0.bias_table"] / 32**0.5
    same(torch.tensor([float(row["distance_20"]) for row in rows]).double(), table[:, 7])
    same(torch.tensor([float(row["distance_-1"]) for row in rows]).double(), table[:, 1])
    logits = numbers(read(tmp_path / "encoder-position-logits.csv"), "key_")
    assert logits.shape == (4 * 5, 5)
    same(logits.view(4, 5, 5)[:, 3, 2], table[:, 1])


@pytest.mark.parametrize("scheme", ["none", "rope", "m4m", "sinusoidal"])
def test_schemes_without_position_logits(save, tmp_path, undrawn, shell, scheme):
    backend = "sdpa" if scheme in ("none", "rope") else "auto"
    checkpoint = save(scheme, "--attention-backend", backend)
    printed = shell(f"plot {checkpoint} --data <data> --out . --sentence 'the cat sat on a dog'")
    assert {"encoder-attention", "encoder-ranks", "decoder-ranks"} <= stems(tmp_path)
    alone = "positions act through content alone, by"
    reasons = {"rope": f"{alone} rotation of q and k", "m4m": f"{alone} key_vectors, product, query_vectors"}
    reason = reasons.get(scheme, "no term adds to the logits")
    assert f"skipped (encoder, {scheme}): position logits: {reason}" in printed
    assert "the given sentence, 1 of 6 tokens unknown" in printed
    tokens = [row["token"] for row in read(tmp_path / "encoder-attention.csv")]
    assert tokens[:7] == ["the", "cat", "sat", "on", "a", "<unk>", "</s>"]


def segment_stack() -> Stack:
    config = PositionConfig(position_scheme="rel_scalar+m2", segment_encoding="head")
    shape = AttentionShape(embed_dim=12, num_heads=2, max_positions=20)
    positions = Placement(resolve(config, shape, "masked_lm"))
    own = positions.layer_schemes(0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_()
    attention = RelPosMultiheadAttention(12, 2, own, positions.plan.scale)
    return Stack("encoder", positions, (attention,))


def test_segments_are_added_to_position_logits():
    stack = segment_stack()
    (alone,) = plot_logits.position_logits(stack, 8)
    both, probs = plot_logits.segment_logits(stack, 8, 2)
    assert "gate" in alone.detail and "segments start at 0, 4" in both.detail
    pairs = next(p for n, p in stack.attentions[0].position.named_parameters() if "pair" in n)
    number = torch.arange(8) // 4
    added = pairs[:, number[:, None] * 2 + number[None, :]]
    for head in (0, 1):
        found = both.panels[head].values - alone.panels[head].values
        same(torch.from_numpy(found), added[head].detach())
        logits = torch.from_numpy(both.panels[head].values)
        weights = logits.exp() / logits.exp().sum(1, keepdim=True)
        same(torch.from_numpy(probs.panels[head].values), weights)
    with pytest.raises(ValueError, match="--segments 3: the model has 2"):
        list(plot_logits.segment_logits(stack, 8, 3))


def test_ranks_of_low_rank_logits():
    torch.manual_seed(0)
    length = 12
    q, k = torch.randn(1, 2, length, 6), torch.randn(1, 2, length, 6)
    q[:, 1, :, 2:] = 0  # the second head's content has rank 2
    factors = (torch.randn(1, 1, length, 3), torch.randn(1, 1, length, 3))
    term = PositionTerms(static_factors=factors)
    inputs = AttentionInputs(q, k, k, (term,), Positions(length, length), 1.0, causal=True)
    parts = plot_logits.logit_parts(plot_sentence.WatchedAttention(inputs, torch.empty(0)))
    found = {name: plot_logits.rank(matrix).tolist() for name, matrix in parts.items()}
    assert found == {"content": [6, 2], "added by positions": [3, 3], "logits": [9, 5]}


def test_long_tokens_and_full_ranks_are_said(tmp_path):
    """Tokens must not run into the title; where every rank is full, the picture says so."""
    figure, ax = axes.plt.subplots()
    panel = axes.Panel({}, [0, 1], [0, 1], torch.eye(2).numpy(), tokens=["a", "x" * 40])
    axes.name_ticks(ax, panel)
    assert max(len(label.get_text()) for label in ax.get_xticklabels()) == axes.LONGEST
    axes.plt.close("all")
    stack = segment_stack()
    q = torch.randn(1, stack.attentions[0].num_heads, 3, 8)
    call = AttentionInputs(q, q, q, (), Positions(3, 3), 1.0)
    watched = plot_sentence.WatchedAttention(call, torch.empty(0))
    (picture,) = plot_logits.ranks(stack, [dict.fromkeys(stack.attentions, watched)])
    assert "all ranks are full" in picture.detail
    alike = replace(watched, inputs=replace(call, k=q[..., :1, :].expand_as(q)))  # of rank 1
    both = [dict.fromkeys(stack.attentions, one) for one in (watched, alike)]
    (picture,) = plot_logits.ranks(stack, both)
    assert picture.panels[0].values.tolist() == [[2, 2]] and "full" not in picture.detail
    assert "mean over 2 sentences" in picture.detail


def test_ranks_in_the_file(save, tmp_path, undrawn, shell):
    checkpoint = save("abs_scalar", "--position-rank", "2")
    shell(f"plot {checkpoint} --data <data> --out .")
    rows = [r for r in read(tmp_path / "encoder-ranks.csv") if r["matrix"] == "added by positions"]
    assert numbers(rows, "head_").tolist() == [[2.0] * 4] * 2


def test_what_is_drawn_is_what_is_written(tmp_path):
    stack = segment_stack()
    picture, _ = plot_logits.segment_logits(stack, 8, 2)
    figure = axes.draw_picture(picture)
    images = [ax.images[0] for ax in figure.axes if ax.images]
    for image, panel in zip(images, picture.panels, strict=True):
        assert image.get_extent() == [-0.5, 7.5, 7.5, -0.5]
        same(torch.from_numpy(image.get_array().data), torch.from_numpy(panel.values))
        assert image.norm.vmin == -image.norm.vmax < 0
    lines = axes.draw_picture(next(distances.scalar_tables(stack, 5))).axes[0].lines
    table = dict(stack.attentions[0].position.named_parameters())["0.bias_table"]
    drawn = torch.stack([torch.as_tensor(line.get_ydata()) for line in lines[1:]])
    same(drawn, table[:, 19 - 5 : 19 + 6].detach())
    axes.plt.close("all")
    png, table = axes.write_picture(picture, tmp_path)
    assert axes.plt.imread(png).std() > 0.1 and not axes.plt.get_fignums()
    values = torch.cat([torch.from_numpy(panel.values) for panel in picture.panels])
    same(numbers(read(table), "key_"), values)


def test_attention_is_cut_and_ranks_take_a_batch(save, tmp_path, undrawn, shell):
    """The data have two sentences: a batch of three is what there is, and the command counts it."""
    said = shell(f"plot {save('rel_scalar')} --data <data> --out . --tokens 4 --sentences 3")
    assert "ranks on 2 sentences" in said
    error = shell.refused(f"plot {save('none')} --sentences 2 --out out")
    assert "--sentences" in error and "--data" in error
    rows = read(tmp_path / "encoder-attention.csv")
    assert [row["token"] for row in rows] == SENTENCE[:4] * 2
    assert numbers(rows, "key_").shape == (8, 4) and (numbers(rows, "key_").sum(1) < 1).all()


def test_the_distribution_of_cosines_counts_pairs_once():
    values = torch.tensor([[1.0, 0.24, -1.0], [0.24, 1.0, 0.16], [-1.0, 0.16, 1.0]])
    panel = axes.Panel({"layer": "all"}, [0, 1, 2], [0, 1, 2], values.double().numpy())
    picture = axes.Picture("c", "t", "d", "signed", [panel], "q", "k", ("", "", ""))
    found = distances.distribution(picture)
    assert found.panels[0].columns == list(range(-10, 11))
    shares = dict(zip(range(-10, 11), found.panels[0].values[0].tolist(), strict=True))
    assert {key: value for key, value in shares.items() if value} == {-10: 1 / 3, 2: 2 / 3}


INNER = "2026-01-01 | INFO | train_inner | "
VALID = "2026-01-01 | INFO | valid | "


def test_learning_curves(tmp_path, shell):
    """Both formats of logs; of what was trained again after a resumption the last line counts."""
    simple = [
        INNER + "epoch 001:     10 / 20 loss=5.5, ppl=3e+02, num_updates=10, lr=0.1",
        INNER + "epoch 001:     20 / 20 loss=9, ppl=200, num_updates=20, lr=0.1",
        INNER + "epoch 001:     20 / 20 loss=4.5, ppl=200, num_updates=20, lr=0.1",
        VALID + "epoch 001 | valid on 'valid' subset | loss 4.25 | ppl 19 | num_updates 20",
    ]
    told = [
        "[2026-01-01 10:11:12,131][train_inner][INFO] - "  # as hydra writes it
        '{"epoch": 1, "loss": "6.5", "ppl": "90", "num_updates": "15"}',
        VALID + '{"epoch": 1, "valid_loss": "5", "valid_num_updates": "15", "valid_ppl": "32"}',
    ]
    for name, lines in (("m4", simple), ("t5", told)):
        (tmp_path / f"{name}.log").write_text("".join(f"{line}\n" for line in ["other words", *lines]))
    shell("plot --curves m4.log t5.log --out out")
    out = tmp_path / "out"
    assert stems(out) == {"learning-curves"}
    found = {(row["part"], row["run"]): row for row in read(out / "learning-curves.csv")}
    expected = {
        ("training", "m4"): ["5.5", "", "4.5"],
        ("training", "t5"): ["", "6.5", ""],
        ("validation", "m4"): ["", "", "4.25"],
        ("validation", "t5"): ["", "5", ""],
    }
    updates = [f"update_{number}" for number in (10, 15, 20)]
    assert {key: [row[n] for n in updates] for key, row in found.items()} == expected
    error = shell.refused("plot --curves m4.log --measure bleu --out out")
    assert "no bleu" in error and "it has loss, lr, ppl" in error


def test_a_curves_line_joins_its_own_points():
    """Another run's updates lie between them."""
    values = torch.tensor([[1.0, float("nan"), 3.0]]).numpy()
    panel = axes.Panel({"part": "training"}, ["m4"], [1, 2, 3], values)
    picture = axes.Picture("c", "t", "d", "lines", [panel], "run", "update", ("", "", ""), neutral=None)
    (line,) = axes.draw_picture(picture).axes[0].lines
    assert line.get_xydata().tolist() == [[1, 1], [3, 3]]
    axes.plt.close("all")


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    panel = axes.Panel({"layer": "1"}, ["1"], [0, 1], torch.ones(1, 2).numpy())
    picture = axes.Picture("p", "t", "d", "lines", [panel], "head", "distance", ("x", "", "y"))
    monkeypatch.setattr(axes, "csv_rows", lambda _: (1 / 0 for _ in "x"))
    (tmp_path / "p.csv").write_text("old")
    with pytest.raises(ZeroDivisionError):
        axes.write_picture(picture, tmp_path)
    assert (tmp_path / "p.csv").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"p.csv", "p.png"}


def test_a_sentence_longer_than_the_table(save, tmp_path, shell):
    checkpoint = save("learned", "--max-source-positions", "4")
    error = shell.refused(f"plot {checkpoint} --data <data> --out out --sentence 'the cat sat on a mat'")
    assert "table of 4 positions and the input has 7" in error
    assert not (tmp_path / "out").exists()


def test_torn_data(save, data, tmp_path, shell):
    torn = tmp_path / "torn"
    shutil.copytree(data, torn)
    (torn / "test.en-de.en.idx").write_bytes((data / "test.en-de.en.idx").read_bytes()[:20])
    assert "run fairseq-preprocess again" in shell.refused(f"plot {save('none')} --data torn --out out")
    assert not (tmp_path / "out").exists()


def test_bars_of_scores(tmp_path, shell):
    """Chen2021's Figure 1 of what both commands of fine-tuning write; a model may lack a data set."""
    glue = {"mine/MNLI": {"values": {"accuracy": 81.5, "updates": 9, "valid1_accuracy": 82.0}, "runs": 5}}
    glue |= {"shaw/MNLI": {"values": {"accuracy": 83.0}}, "shaw/RTE": {"values": {"accuracy": 60.0}}}
    glue |= {"shaw/MRPC": {"values": {"accuracy": 84.0, "f1": 88.0, "loss": 0.4}}}
    xtreme = {"mine": {"XNLI": 67.0, "XQuAD": [66.0, 49.9], "MLQA": None}}
    for name, content in (("chen", glue), ("xtreme", xtreme)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    plot = "plot --scores chen.json xtreme.json --out"
    shell(f"{plot} out")
    assert (tmp_path / "out" / "scores.png").stat().st_size > 5000
    rows = (tmp_path / "out" / "scores.csv").read_text().splitlines()
    assert rows == ["data,model,score_0", "MNLI,mine,81.5", "MNLI,shaw,83", "XNLI,mine,67", "XNLI,shaw,"]
    assert "left out: QNLI" in shell(f"{plot} two --on XQuAD,QNLI")
    assert "XQuAD,mine,66" in (tmp_path / "two" / "scores.csv").read_text()
    shell(f"{plot} two --on MRPC")
    assert "MRPC,shaw,88" in (tmp_path / "two" / "scores.csv").read_text()
    assert "--on QNLI: the tables have MNLI, MRPC, RTE, XNLI, XQuAD" in shell.refused(f"{plot} two --on QNLI")
    for content in ("[]", "{}{", '{"a": 3}'):
        (tmp_path / "chen.json").write_text(content)
        assert "chen.json is not a table of relpos finetune" in shell.refused("plot --scores chen.json --out three")


def drawn(kind: str, panels: list, **more) -> list:
    """The axes of a picture."""
    words = ("name", "title", "detail", kind, panels, "run", "update", ("update", "", "loss"))
    with axes.plt.rc_context(axes.STYLE):
        return axes.draw_picture(axes.Picture(*words, **more)).axes


def test_ten_curves_are_told_apart() -> None:
    """By the legend, and by what each looks like; one point is a marker."""
    values = np.linspace(1, 2, 10)[:, None] + np.linspace(0, 1, 20)
    points = np.full((10, 20), np.nan)
    points[:, -1] = 1.5
    parts, runs = {"training": values, "validation": points}, list("abcdefghij")
    panels = [axes.Panel({"part": part}, runs, list(range(20)), one) for part, one in parts.items()]
    found = drawn("lines", panels, neutral=None)
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in found[0].lines}
    assert len(looks) == 10 and [text.get_text() for text in found[0].figure.legends[0].texts] == list("abcdefghij")
    assert all(line.get_marker() != "None" for line in found[1].lines)
    assert [ax.get_title() for ax in found] == ["training", "validation"]


def test_small_differences_are_no_cliffs() -> None:
    """The axis covers a hundredth of the values, and no offset is taken off its numbers."""
    [ax] = drawn("lines", [axes.Panel({"part": "training"}, ["a"], [1, 2], np.array([[6.0, 5.9998]]))], neutral=None)
    low, high = ax.get_ylim()
    assert high - low >= 0.0599 and not ax.yaxis.get_major_formatter().get_useOffset()


def test_bars_begin_at_zero() -> None:
    for scores in ([90.0, 91.0], [-3.0, 5.0], [0.0, 0.0]):
        [ax] = drawn("bars", [axes.Panel({"data": "SQuAD"}, ["a", "b"], [0], np.array(scores)[:, None])])
        low, high = ax.get_ylim()
        assert low == min(0, 1.1 * min(scores)) and high > max(scores) and ax.get_title().startswith("SQuAD")


def test_a_panel_of_zeros_says_so() -> None:
    panel = axes.Panel({"layer": "2", "head": "all"}, [0, 1], [0, 1], np.array([[0.0, np.nan], [0.0, 0.0]]))
    assert panel.title == "layer 2, all heads, all zero"
    assert drawn("signed", [panel])[0].get_title() == panel.title


def test_fonts_have_the_characters_of_tokens(monkeypatch, caplog) -> None:
    """A font of the system, if one has them; else a line says which are drawn as boxes."""
    known = {"usual": {ord("a")}, "han": {ord("東"), ord("京")}}
    monkeypatch.setattr(axes.font_manager, "findfont", lambda name: "usual")
    monkeypatch.setattr(axes, "_characters_of", lambda path: known[path])
    monkeypatch.setattr(axes.font_manager.fontManager, "ttflist", [SimpleNamespace(name="Han", fname="han")])
    assert axes.fonts_for("a a\n") == ["DejaVu Sans"] and axes.fonts_for("a東") == ["DejaVu Sans", "Han"]
    assert not caplog.records
    assert axes.fonts_for("東ก") == ["DejaVu Sans", "Han"] and "no font of this system has ก" in caplog.text


def test_axes_of_others_are_no_cliffs_either(tmp_path, monkeypatch) -> None:
    """Of what draws for itself: an axis in full numbers, over more than noise; marks of a place are no values."""
    kept = []
    monkeypatch.setattr(axes, "save_figure", lambda figure, path: kept.append(figure))
    with axes.panels(tmp_path / "x.png", 1, 4, 3) as [ax]:
        ax.plot([1, 2, 3], [13.1660, 13.1695, 13.1662], "o-")
        ax.axvline(2)
    low, high = kept[0].axes[0].get_ylim()
    assert high - low == pytest.approx(0.01 * 13.1695, rel=1e-6) and low < 13.166 < high
    assert not kept[0].axes[0].yaxis.get_major_formatter().get_useOffset()


def test_a_picture_inside_a_page() -> None:
    """Equal pictures are equal texts, which name no other place; words are text as they are, black is the page's."""
    names = ["_a", "$x$", "<b> #000000", "d", "e", "f", "g"]  # the seventh colour is black
    panels = [axes.Panel({}, names, [1.5, 2.0], np.arange(14.0).reshape(7, 2))]
    picture = axes.Picture("", "T & U", "", "lines", panels, "run", "", ("x", "", "y"), neutral=None)
    page = axes.svg_text(picture)
    assert page == axes.svg_text(picture) and page.startswith("<svg ") and "http" not in page
    assert [word in page for word in (">_a<", ">$x$<", ">&lt;b&gt; #000000<", ">T &amp; U<")] == [True] * 4
    assert "stroke: #000000" not in page and page.count("stroke-width: 1.4") == 2 * 7


@pytest.mark.parametrize(
    ("places", "labels"),
    [
        ([128, 256, 1024], "128 256 1024"),
        ([0, 32, 64], "0 32 64"),
        (range(1, 1025), "1 4 16 64 256 1024"),
        ([0.5, 700.5], "1 4 16 64 256"),
    ],
)
def test_an_axis_of_tokens_has_whole_numbers_and_ends_where_the_curves_do(places, labels):
    with plt.rc_context(axes.STYLE):
        figure, axis = plt.subplots()
        axis.plot(list(places), list(places))
        axes.show_tokens(axis, "memory")
        figure.canvas.draw()
        assert " ".join(label.get_text() for label in axis.get_xticklabels()) == labels
        left, right = axis.get_xlim()
        assert 0 <= left <= min(places) and max(places) <= right <= 1.2 * max(places)
    plt.close(figure)
