"""Whole models and layers as the benchmark runs them: alike where they must be, and reported."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch

from helpers.shell import Shell
from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.cli import benchmark as declared
from relpos_fairseq.lab.benchmarks import models, whole_models
from relpos_fairseq.lab.benchmarks.layers import (
    LEAST_TABLE,
    PACKAGES,
    PEERS,
    LayerSetting,
    OurLayer,
    fairseq_layer,
    layer_runner,
)

CPU = torch.device("cpu")


ONCE = f"benchmark models --rounds 1 --threads {torch.get_num_threads()}"
TRANSLATE = "--size tiny --batch-size 2 --length 4 --vocab-size 40 --beam 2"
SMALL = "--width 16 --ffn 32 --heads 2"
TINY = whole_models.TranslationSetting("tiny", 40, 3, 8, 2, 0.0, torch.float32, CPU)
LAYER = LayerSetting(16, 32, 2, 2, 9, 3, 0.0, torch.float32, CPU)


def test_translation_report(tmp_path: Path, shell: Shell) -> None:
    """The baseline in milliseconds, schemes as ratios; files are written, sections once."""
    page = tmp_path / "README.md"
    page.write_text("# Numbers\n")
    for number in range(2):
        written = f"--write README.md --csv {number}.csv --plot bars.png"
        out = shell(f"{ONCE} --parts translation {TRANSLATE} --schemes shaw,m4 {written}")
    text = page.read_text()
    assert "train: 6 candidates, 1 rounds, 6 of 6 samples on a machine that was not idle" in out
    assert text.startswith("# Numbers\n") and text.count("| `shaw` |") == 1 and "nan" not in text
    assert "models translation cpu float32 size tiny 2 x 4: begin" in text  # another batch has a table of its own
    assert "| translation | train | generate |" in text and "size tiny, 2 sentences of 3-4 tokens" in text
    rows = list(csv.DictReader((tmp_path / "1.csv").open()))
    assert [row["name"] for row in rows if row["name"] not in whole_models.GAINS] == [*["fairseq", "shaw", "m4"] * 2]
    assert {row["column"] for row in rows} == {"train", "generate"}
    assert all(0 < float(row["ratio"]) < math.inf and float(row["ms"]) > 0 for row in rows)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*partial*"))


def test_backends_side_by_side(tmp_path: Path, shell: Shell) -> None:
    """A row each in both parts."""
    layers = f"{SMALL} --position-clip-distance 3 --max-tokens 9 --lengths 9 --modes train --peers none"
    shell(f"{ONCE} {TRANSLATE} {layers} --schemes none,shaw --backends auto,blocked --write page.md")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| `shaw, blocked` |")]) == 2
    assert len([line for line in lines if line.startswith("| `shaw` |")]) == 2


def test_the_backend_is_the_rows() -> None:
    """What a row is named after evaluates it."""
    layer = OurLayer("shaw, blocked", LAYER)
    assert layer.layers[0].self_attn.backend == "blocked"
    assert OurLayer("shaw", LAYER).layers[0].self_attn.backend == "auto"


def test_the_baseline_of_a_handful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """More schemes than are in memory at a time: the baseline is reported once.

    What the optimizer and the loss gain has rows of its own, in training alone.
    """
    monkeypatch.setattr(models, "TOGETHER", 1)
    shell(f"{ONCE} --parts translation {TRANSLATE} --schemes t5,alibi --csv rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    names = {mode: [r["name"] for r in rows if r["column"] == mode] for mode in models.MODES}
    assert names["train"] == ["fairseq", *whole_models.GAINS, "t5", "alibi"]
    assert names["generate"] == ["fairseq", "t5", "alibi"]
    assert float(rows[0]["ratio"]) == 1.0


def test_both_sides_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and fairseq's have fairseq's optimizer and loss; a row of gains says what it has."""
    used, make = [], whole_models.make_optimizer
    monkeypatch.setattr(whole_models, "make_optimizer", lambda kind, model: used.append(kind) or make(kind, model))
    losses = {}
    for name in ("fairseq", "m4", *whole_models.GAINS):
        losses[name] = whole_models.translation_training_step(name, TINY)()
    own, ours = whole_models.FairseqAdam, whole_models.RelPosAdam
    assert used == [own, own, ours, own, ours]
    kinds = [row[1] for row in whole_models.GAINS.values()]
    assert kinds == [
        whole_models.LabelSmoothedCrossEntropyCriterion,
        *[whole_models.RelPosLabelSmoothedCrossEntropyCriterion] * 2,
    ]
    assert whole_models.FAIRSEQS_OWN[1] is whole_models.LabelSmoothedCrossEntropyCriterion
    for name in whole_models.GAINS:
        torch.testing.assert_close(losses[name], losses["fairseq"])


def test_what_parsers_offer_is_what_jobs_take() -> None:
    """Parsers are torch-free, so what they offer is written once more in them."""
    assert set(declared.SIZES) == set(whole_models.MODEL_SIZES)
    assert tuple(declared.BACKENDS.split(", ")) == tuple(BACKENDS)
    assert PACKAGES == ("transformers", "flashdeberta", "x-transformers")


def test_a_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """What the file has of the same setting is not measured again; another setting is."""
    line = f"{ONCE} --parts layers --peers none {SMALL} --modes train,forward --schemes t5 --csv rows.csv"
    shell(f"{line} --lengths 3 --max-tokens 6")
    path = tmp_path / "rows.csv"
    before = path.read_text()
    measured = []
    honest = models.timed_rows
    monkeypatch.setattr(models, "timed_rows", lambda column, *rest: measured.append(column) or honest(column, *rest))
    shell(f"{line} --resume --lengths 3,2 --max-tokens 6")
    assert measured == ["train 2", "forward 2"] and path.read_text().startswith(before)
    shell(f"{line} --resume --lengths 3 --max-tokens 9")
    assert measured[2:] == ["train 3", "forward 3"]


def test_fairseq_and_sinusoidal_are_one_model() -> None:
    """Same seed, same batch: losses after steps of Adam agree, and so do the hypotheses."""
    steps = [whole_models.translation_training_step(name, TINY) for name in ("fairseq", "sinusoidal")]
    for _ in range(3):
        ours, theirs = (step() for step in steps)
        torch.testing.assert_close(ours, theirs)
    found = [whole_models.generation(name, TINY)() for name in ("fairseq", "sinusoidal")]
    for one, other in zip(*found, strict=True):
        assert len(one[0]["tokens"]) == TINY.length + 1  # and the sentence's end
        assert one[0]["tokens"].tolist() == other[0]["tokens"].tolist()


def test_sentences_are_padded_on_fairseqs_sides() -> None:
    """Sources left, targets right, no row empty, no token outside the vocabulary."""
    batch = whole_models.sentences(TINY)
    source, target = batch["net_input"]["src_tokens"], batch["target"]
    assert source.shape == (3, max(batch["net_input"]["src_lengths"]))
    assert (source[:, -1] == 2).all() and not (target[:, 0] == 1).any()
    assert source.max() < 44 and (source != 1).sum(1).min() >= 6


@pytest.mark.slow
def test_layers_report(shell: Shell) -> None:
    """Every library that is installed has a row; the others are named."""
    pytest.importorskip("transformers")
    sizes = f"{SMALL} --position-clip-distance 3 --max-tokens 18 --lengths 9,5"
    out = shell(f"{ONCE} --parts layers --schemes none,learned,shaw,tupe {sizes} --csv rows.csv")
    assert "| layers | train 9 | forward 9 | memory 9 | train 5 |" in out and "nan" not in out
    assert "| BERT relative_key (transformers), as `shaw_keys` |" in out
    assert "| `fairseq` |" in out and "| `learned` |" not in out and " MiB" in out
    for peer in PEERS:
        reason = peer.absence(CPU)
        assert (peer.name if reason is None else reason) in out


def test_our_layer_without_positions_is_fairseqs() -> None:
    """The baseline of the table is what fairseq computes."""
    torch.manual_seed(0)
    ours, theirs = OurLayer("none", LAYER), fairseq_layer(LAYER)
    theirs.module.load_state_dict(ours.layers[0].state_dict())
    (found, *gradients), (wanted, *others) = (
        (layer_runner(layer, LAYER, "forward")(), *layer_runner(layer, LAYER, "train")()) for layer in (ours, theirs)
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients[0], others[0])


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peers_have_our_sizes(peer) -> None:
    """A peer's layer has our projections and feed-forward; what it has beyond them is known."""
    if reason := peer.absence(CPU):
        pytest.skip(reason)
    width, ffn, heads, head_dim = LAYER.width, LAYER.ffn, LAYER.heads, LAYER.width // LAYER.heads
    biases = 4 * width + ffn + width
    beyond = {
        "BERT relative_key (transformers)": (2 * LEAST_TABLE - 1) * head_dim,
        "BERT relative_key_query (transformers)": (2 * LEAST_TABLE - 1) * head_dim,
        "DeBERTa-v2 (transformers)": (LEAST_TABLE + 2) * width,
        "T5 (transformers)": 32 * heads - biases - 2 * width,
        # u, v and W_R; the four projections have no biases
        "Transformer-XL, causal (transformers)": 2 * width + width**2 - 4 * width,
        "T5's bias (x-transformers)": 32 * heads - 4 * width - width,
        "rotary (x-transformers)": -4 * width - width,
        "ALiBi (x-transformers)": -4 * width - width,
    }
    torch.manual_seed(0)
    layer = peer.layer(LAYER)
    plain = models.count_parameters(OurLayer("none", LAYER))
    assert models.count_parameters(layer) == plain + beyond.get(peer.name, 0)
    out = layer_runner(layer, LAYER, "forward", peer.time_first)()
    rows = (LAYER.length, LAYER.batch) if peer.time_first else (LAYER.batch, LAYER.length)
    assert out.shape == (*rows, width) and bool(out.isfinite().all())
