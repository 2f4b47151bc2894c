"""Joined pairs of STS-B: what the example's script writes."""

from __future__ import annotations

import csv
import runpy
from collections import Counter

import pytest
from conftest import ROOT


def test_joined_pairs_have_their_mean(tmp_path):
    made = runpy.run_path(str(ROOT / "examples" / "comparison" / "joined.py"))
    header = "index\tsentence1\tsentence2\tscore\n"
    rows = "".join(f"{n}\tfirst{n}\tsecond{n}\t{n % 6}.0\n" for n in range(20))
    (tmp_path / "train.tsv").write_text(header + rows)
    for name in ("one.tsv", "two.tsv"):
        made["join"](tmp_path / "train.tsv", tmp_path / name)
    assert (tmp_path / "one.tsv").read_bytes() == (tmp_path / "two.tsv").read_bytes()
    found = list(csv.DictReader((tmp_path / "one.tsv").open(), delimiter="\t"))
    seen = Counter()
    for row in found:
        numbers = [int(word.removeprefix("first")) for word in row["sentence1"].split()]
        assert row["sentence2"] == " ".join(f"second{n}" for n in numbers) and len(numbers) == made["PAIRS"]
        assert float(row["score"]) == pytest.approx(sum(n % 6 for n in numbers) / len(numbers), abs=1e-4)
        seen.update(numbers)
    assert seen == dict.fromkeys(range(20), made["TIMES"])
