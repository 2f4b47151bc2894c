"""Task kind `memory`: what memory is worth, how far back context is used, and what a sliding window takes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from helpers.commands import relpos_job
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison.reporting import contents, rendered
from relpos_fairseq.lab.comparison.scheduling import Comparison
from relpos_fairseq.lab.comparison.spec import make_spec
from relpos_fairseq.lab.comparison.summary import summarise
from relpos_fairseq.lab.comparison.tasks.memory import TRAINED, WINDOWS, effective_contexts, losses_of

TINY = {"decoder-layers": 2, "decoder-embed-dim": 16, "decoder-ffn-embed-dim": 16, "decoder-attention-heads": 2}
TRAIN = {"max-update": 3, "warmup-updates": 1, "batch-size": 4, "save-interval-updates": 2, **TINY}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Characters of words in documents."""
    folder, drawn = tmp_path_factory.mktemp("data"), random.Random(1)
    for name in ("train", "valid", "test"):
        lines = [" ".join(drawn.choices(("memory", "is", "worth", "it"), k=8)) for _ in range(40)]
        (folder / name).write_text("\n".join(["" if number % 10 == 9 else x for number, x in enumerate(lines)]))
    texts = [part for name in ("train", "valid", "test") for part in (f"--{name}", str(folder / name))]
    relpos_job("prepare", "lm", *texts, "--level", "char", "--documents", "blank", "--out", str(folder / "bin"))
    return folder / "bin"


def test_a_comparison_of_memories(tmp_path, data):
    """Every set keeps every prediction; the sliding window's scores are those of memory; a report has both tables."""
    task = {"kind": "memory", "data": str(data), "segment": 8, "memory": 8, "times": [0, 2], "predictions": 128}
    schemes = {
        "alone": {"position-scheme": "transformer_xl", "mem-len": 0},
        "m4": {"position-scheme": "m4", "reset-memory-at-document": True},
    }
    content = {"seeds": 1, "schemes": schemes, "train": TRAIN, "tasks": {"text": task | {"windows": 3, "step": 8}}}
    spec = tmp_path / "small.yaml"
    spec.write_text(yaml.safe_dump(content, sort_keys=False))
    made = Comparison.of(spec, tmp_path / "work")
    assert made.run() == 0
    for _, result in made.ended():
        assert set(result["sets"]) == {TRAINED, "memory 0", "memory 16", WINDOWS}
        for name, length in {"memory 0": 0, "memory 16": 16, WINDOWS: 24}.items():
            own = result["sets"][name]
            losses = losses_of(own)
            assert losses.shape == ((3, 32) if name == WINDOWS else (1, 128)) and own["contexts"][-1] == length
            assert own["values"]["perplexity"] == pytest.approx(math.exp(losses[-1].mean()), rel=1e-5)
        trained = result["sets"][TRAINED]
        assert trained["contexts"] == [0 if result["scheme"] == "alone" else 8]
        if result["scheme"] == "alone":
            assert trained["values"] == result["sets"]["memory 0"]["values"]
        timed = result["sets"]["memory 16"]["timed"]
        assert len(timed) == 3 and all(row["largest"] < 1e-5 and row["memory"] > 0 < row["window"] for row in timed)
    summary = summarise(made.spec, made.ended(), 2)
    for text in (rendered(ending, contents(summary)) for ending in ("md", "html")):
        assert "Relative effective context length, tokens of 8 to 24 (seeds 1 in turn)" in text
        assert "Evaluation with memory 16: milliseconds a prediction" in text


def test_a_text_too_short_to_time(tmp_path, data):
    """It is said before anything is trained."""
    task = {"kind": "memory", "data": str(data), "memory": 1024}
    (made,) = make_spec("short", {"schemes": ["t5"], "tasks": {"text": task}}).tasks.values()
    with pytest.raises(UserError, match="has a test of .* tokens, and timing needs 8,385: write timed: 0"):
        made.make(tmp_path)


def naive_context(losses: np.ndarray, model: int, share: float) -> int:
    """Dai's algorithm in scalar loops, without numpy's axes."""
    models, contexts, tokens = losses.shape
    at = 0
    while at + 1 < contexts:
        least = [min(float(losses[m, at, t]) for m in range(models)) for t in range(tokens)]
        ranked = sorted(range(tokens), key=lambda t: (-least[t], t))[: max(1, round(share * tokens))]
        short = sum(min(least[t], float(losses[model, at, t])) for t in ranked) / len(ranked)
        long = sum(min(least[t], float(losses[model, at + 1, t])) for t in ranked) / len(ranked)
        if (math.exp(short) - math.exp(long)) / math.exp(short) < 0.01:
            return at
        at += 1
    return at


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_effective_context_is_the_paper_s(share):
    """Equal to loops on random losses; a model that stops gaining stops there, and one that only gains does not."""
    draw = np.random.default_rng(3)
    for _ in range(20):
        losses = np.cumsum(-draw.exponential(0.02, (3, 6, 40)), 1) + draw.exponential(2, (1, 1, 40)) + 1
        assert effective_contexts(losses, share) == [naive_context(losses, m, share) for m in range(3)]
    gains = np.array([[0.1] * 5, [0.1, 0.1, 0, 0.1, 0.1], [-0.1] * 5])
    losses = 3 - np.concatenate([np.zeros((3, 1)), np.cumsum(gains, 1)], 1)[..., None].repeat(7, 2)
    assert effective_contexts(losses[:1], share) == [5]
    assert effective_contexts(losses[1:2], share) == [2]
    assert effective_contexts(losses[2:], share) == [0]
    assert effective_contexts(losses * np.nan, share) == [0, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": 1}, "segment must be >= 2, got 1"),
        ({"times": [0, -1]}, "times/1 is -1, and must be a whole number from 0"),
        ({"times": ["a"]}, 'times/0 is "a", and must be a whole number from 0'),
        ({"times": [0.5]}, "times/0 is 0.5, and must be a whole number from 0"),
        ({"times": [2, 2]}, "times must be different whole numbers >= 0"),
        ({"times": []}, "times must be different whole numbers >= 0"),
        ({"step": 1}, "step must be >= 2, got 1"),
    ],
)
def test_wrong_numbers(change, message):
    task = {"kind": "memory", "data": "x", **change}
    with pytest.raises(ValueError, match=message):
        make_spec("wrong", {"schemes": ["t5"], "tasks": {"text": task}})
