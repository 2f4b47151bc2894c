"""examples/roberta/finetune_mrpc.py: its pairs, its scores, and (with accelerate) a whole run."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers import ROOT
from helpers.commands import relpos
from helpers.exported import write_checkpoint
from helpers.glue_data import write_glue
from relpos_fairseq.io.reading import read_json

SCRIPT = ROOT / "examples" / "roberta" / "finetune_mrpc.py"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """An exported folder, and GLUE."""
    folder = tmp_path_factory.mktemp("mrpc")
    _, checkpoint = write_checkpoint(folder, "bpe")
    assert relpos("export", "transformers", checkpoint, "--out", folder / "out") == 0
    return folder / "out", write_glue(folder / "glue")


def test_pairs_and_scores(places):
    folder, glue = places
    script = runpy.run_path(str(SCRIPT))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    rows = script["read"](glue, "valid", tokenizer, 12)
    lines = [line.split("\t") for line in (glue / "MRPC" / "dev.tsv").read_text().splitlines()[1:]]
    assert [row["labels"] for row in rows] == [int(line[0]) for line in lines]
    whole = [tokenizer(line[3], line[4])["input_ids"] for line in lines]
    short = [(row["input_ids"], ids) for row, ids in zip(rows, whole, strict=True) if len(ids) < 12]
    assert all(ours == ids for ours, ids in short) and max(len(r["input_ids"]) for r in rows) <= 12
    logits = np.array([[0, 1], [0, 1], [1, 0], [1, 0]])
    told = script["scores"](SimpleNamespace(predictions=logits, label_ids=np.array([1, 0, 1, 0])))
    assert told == {"f1": 0.5, "accuracy": 0.5}


def test_a_run(places, tmp_path, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    folder, glue = places
    given = ("--data", glue, "--out", tmp_path / "tuned", "--epochs", "1", "--longest", "18")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder), *map(str, given)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "dev F1 0." in capsys.readouterr().out
    assert relpos("convert", tmp_path / "tuned", "--to", "same", "--out", tmp_path / "back") == 0
    told = read_json(tmp_path / "back" / "conversion.json")
    assert "classification" in told["differences"]
