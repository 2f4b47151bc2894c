"""Options that mean the same are spelt the same in every command."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest

from relpos_fairseq.cli.command import reading_of, roles_of, spelling
from relpos_fairseq.cli.main import COMMANDS, load
from relpos_fairseq.io.options import Role

# What a path is called, by what is done with it; a command whose option means one of these calls it so.
PATHS = {
    Role("file", writes=True): "--out --plot --csv --by-token --text",  # --text: instead of --out
    Role("folder", writes=True): "--out",
    Role("file or folder", writes=True): "--out",
    Role("file", reads=True, writes=True): "--write --csv",
    Role("folder", reads=True, writes=True): "--work --results --downloads",
    Role("file or folder", reads=True): "checkpoint checkpoints source",
    Role("file", reads=True, may_be_text=True): "context",
    Role("folder", reads=True): (
        "--data --from-dir --tokenizer-folder --prepared --czeng --verify glue "
        "--xquad --mlqa --tydiqa --xnli --squad --qa-data"
    ),
    Role("file", reads=True): (
        "checkpoint --checkpoint checkpoints --xnli-model --qa-model --baseline file files --file --prompt-file "
        "--train --valid --test --eval --text --dict --sentencepiece system --reference --source --predictions "
        "--null-odds --curves --scores spec"
    ),
}
FIELDS = [(name, field) for name in COMMANDS for field in dataclasses.fields(load(name))]


def kind_of(name: str, field: dataclasses.Field) -> object:
    """What a field holds: a path by its role, a flag, or values of a type."""
    return (
        roles_of(load(name)).get(spelling(field)) or field.metadata.get("action") or reading_of(field.type).get("type")
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_is_called_by_what_is_done_with_it(name):
    for called, role in roles_of(load(name)).items():
        assert called in PATHS[role].split(), (name, called)


def test_one_line_of_help_is_of_one_spelling():
    found = defaultdict(set)
    for name, field in FIELDS:
        if not str(field.metadata.get("help")).startswith(("None", "default: ", "as in training")):
            found[field.metadata["help"], kind_of(name, field)].add(spelling(field))
    assert {help: names for (help, _), names in found.items() if len(names) > 1} == {}
