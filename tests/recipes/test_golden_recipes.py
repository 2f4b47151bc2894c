"""Every recipe that is a base and what differs says what it said in version 7983f42."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.recipes import RECIPES, names, said

GOLDEN = json.loads(Path(__file__).with_name("golden_recipes.json").read_text())
# Ours got names of their own: fairseq's Adam and its loss are what fairseq's names mean.
RENAMED = {"adam": "relpos_adam", "label_smoothed_cross_entropy": "relpos_label_smoothed_cross_entropy"}


def test_no_recipe_is_missing():
    found = {f"{part}/{name}" for part in RECIPES for name in names(ROOT / "examples" / part)}
    assert found == set(GOLDEN)


@pytest.mark.parametrize("recipe", GOLDEN)
def test_recipe_says_what_it_said(recipe):
    expected = dict(GOLDEN[recipe])
    for part in ("optimizer._name", "criterion._name"):
        expected[part] = RENAMED.get(expected[part], expected[part])
    path = ROOT / "examples" / recipe
    assert said(path.parent, path.name) == expected
