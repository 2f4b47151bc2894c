"""`relpos schemes`: the list of all, what is known of one, and the tables of the Markdown pages."""

from __future__ import annotations

import pytest

from helpers import ROOT
from helpers.shell import Shell
from relpos_fairseq import scheme_table
from relpos_fairseq.schemes import scheme_names


@pytest.mark.parametrize("page", ["README.md", "relpos_fairseq/schemes/README.md"])
def test_pages_have_the_tables_of_the_code(page: str) -> None:
    """`relpos schemes --write PAGE` would change nothing."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert scheme_table.renewed(text) == text, f"run: relpos schemes --write {page}"


def test_the_list_has_a_line_of_80_columns_for_each(shell: Shell) -> None:
    lines = shell("schemes").splitlines()
    listed = [line.split()[0] for line in lines if line[:1] == " "]
    assert sorted(listed) == sorted(scheme_names()) and max(map(len, lines)) <= 80
    assert [line.partition(":")[0] for line in lines if ": " in line and line[0] != " "] == list(scheme_table.FAMILIES)
    families = {"none": "none", "learned": "absolute", "m3": "vectors", "t5": "scalars", "xpos": "rotations"}
    families |= {"fox": "gates", "dape": "mixing", "cable": "gates"}
    assert {name: scheme_table.family(name) for name in families} == families


@pytest.mark.parametrize("name", scheme_names())
def test_one_scheme_is_described(name: str, shell: Shell) -> None:
    first, *lines = shell(f"schemes {name}").splitlines()
    assert first.startswith(f"{name}: ")
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line[0] != " "][:2] == ["paper", "logits"]
