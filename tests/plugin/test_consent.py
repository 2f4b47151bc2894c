"""What is ours has names of its own: fairseq's models, optimizer and criterions do as ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import relpos_fairseq  # noqa: F401  lets torch.load read checkpoints
from helpers.commands import TRAIN, Corpus, command, load, losses, train

FAIRSEQS = ("--optimizer", "adam", "--criterion", "label_smoothed_cross_entropy")
OURS = ("--optimizer", "relpos_adam", "--criterion", "relpos_label_smoothed_cross_entropy")
M4 = ("--position-scheme", "m4", "--disable-validation")


def tensors(path: Path) -> dict:
    """Parameters and moments of a checkpoint."""
    saved = load(path)
    moments = saved["last_optimizer_state"]["state"]
    return {"model": saved["model"], "moments": {number: moments[number]["exp_avg_sq"] for number in moments}}


@pytest.mark.slow
def test_fairseqs_transformer_trains_as_without_the_plugin(corpus: Corpus, tmp_path: Path) -> None:
    """Bit by bit, with fairseq's Adam and criterion, each run in a process of its own."""
    names = dict(zip(OURS, FAIRSEQS, strict=True))
    flags = ["--arch", "transformer_tiny", *(names.get(part, part) for part in TRAIN)]
    flags += ["--encoder-layers", "1", "--decoder-layers", "1", "--max-update", "4"]
    runs = {"with": ("--user-dir", "relpos_fairseq"), "without": ()}
    for name, plugin in runs.items():
        folder = ("--save-dir", tmp_path / name, "--disable-validation")
        printed = command("fairseq-train", corpus.binary, *flags, *folder, *plugin)
        assert len(losses(printed)) == 4
    one, other = (tensors(tmp_path / name / "checkpoint_last.pt") for name in runs)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("first, then", [(FAIRSEQS, OURS), (OURS, FAIRSEQS)], ids=["to", "from"])
@pytest.mark.slow
def test_a_run_goes_on_with_the_other_adam(corpus: Corpus, tmp_path: Path, first: tuple, then: tuple) -> None:
    """A checkpoint of fairseq's Adam and criterion resumes with ours, state included, and back."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(corpus, whole, *M4, *first, "--max-update", "4")
    train(corpus, parted, *M4, *first, "--max-update", "2")
    printed = train(corpus, parted, *M4, *then, "--max-update", "4")
    assert re.search(r"Loaded checkpoint .*\(epoch \d+ @ 2 updates\)", printed)
    assert len(losses(printed)) == 2
    found, wanted = (tensors(path / "checkpoint_last.pt") for path in (parted, whole))
    for name in [name for name in wanted["model"] if name.endswith("k_proj.bias")]:
        del found["model"][name], wanted["model"][name]  # gradients are 0 but for rounding
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
