"""The table of patches/README.md is what is replaced in fairseq, and RELPOS_PATCHES=needed leaves fairseq's faults."""

from __future__ import annotations

import json
import re

import pytest

from helpers import ROOT, USER_DIR
from helpers.commands import TEST_SENTENCES, Corpus, command, generate_arguments, hypotheses, losses, train_arguments
from relpos_fairseq import plugin

ROWS = plugin.replacements()
# How often each function of the table is replaced, in a process that runs fairseq's commands.
DEPTHS = """
import json
import fairseq_cli.interactive, fairseq_cli.train
from pkgutil import resolve_name
from relpos_fairseq import plugin
depths = {}
for name in filter(None, (row.theirs for row in plugin.replacements())):
    found, depths[name] = resolve_name(name), 0
    depths[name] += isinstance(found, type) and found.__module__.startswith("relpos_fairseq.")
    while getattr(getattr(found, "__code__", None), "co_filename", "") == plugin.__file__:
        found, depths[name] = found.__wrapped__, depths[name] + 1
print(json.dumps(depths))
"""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.theirs}-{row.ours}")
def test_a_row_has_its_reason_and_a_test(row: plugin.Replacement) -> None:
    assert row.kind in plugin.ON["all"] and row.why
    assert row.ours.startswith(("patches.", "models.", "tasks.", "inference."))  # below plugin.py, which names them
    path, found = None, re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", row.tests)
    for file, name in found:
        path = file or path
        assert f"def {name}" in (ROOT / "tests" / path).read_text(encoding="utf-8")
    assert found


@pytest.mark.parametrize("asked", ["", *plugin.ON])
def test_a_kind_that_is_off_is_fairseqs_own(asked: str) -> None:
    depths = json.loads(command("python", "-W", "ignore", "-c", DEPTHS, RELPOS_PATCHES=asked).splitlines()[-1])
    for name, depth in depths.items():
        assert depth == sum(row.theirs == name and row.kind in plugin.ON[asked or "all"] for row in ROWS), name


def test_another_value_is_one_line() -> None:
    said = command("fairseq-train", "--user-dir", USER_DIR, "data", fails=True, RELPOS_PATCHES="some")
    assert said.strip().endswith("UserError: RELPOS_PATCHES must be all or needed, got 'some'")
    assert "Traceback" not in said


def test_our_models_need_no_more(corpus: Corpus, tmp_path) -> None:
    """They train, save, resume and generate beside fairseq's faults, one of which leaves out the last sentences."""
    for updates in (2, 4):
        flags = ("--position-scheme", "m4", "--max-update", str(updates))
        printed = command("fairseq-train", *train_arguments(corpus, tmp_path, *flags), RELPOS_PATCHES="needed")
        assert len(losses(printed)) == 2
    assert re.search(r"Loaded checkpoint .*\(epoch 1 @ 2 updates\)", printed)
    arguments = generate_arguments(corpus, tmp_path / "checkpoint_last.pt")
    printed = command("fairseq-generate", *arguments, RELPOS_PATCHES="needed")
    assert TEST_SENTENCES - 8 < len(hypotheses(printed)) < TEST_SENTENCES
