"""Options that mean the same are spelt the same in every command, and every old spelling is taken."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict

import pytest

from relpos_fairseq.cli.command import parse, parser_of, reading_of, roles_of, spelling
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
# Given up for one meaning, kept for another.
KEPT = {
    "--data": "of a checkpoint, and not the text that it is made of (--from-dir)",
    "--tokens": "how many are drawn or scored, and not --max-tokens of a batch",
    "--samples": "texts that are drawn, and not --resamples of a bootstrap",
    "--language": "of questions, and not a pair's --target-lang",
    "--split": "a part of the data, and not the --shares that make parts",
    "--tokenizer": "what words are cut by, and not the tokenizer that is trained (--train-tokenizer)",
}

FIELDS = [(name, field) for name in COMMANDS for field in dataclasses.fields(load(name))]
OLD = [(name, field, was) for name, field in FIELDS for was in field.metadata.get("was", ())]


def kind_of(name: str, field: dataclasses.Field) -> object:
    """What a field holds: a path by its role, a flag, or values of a type."""
    return (
        roles_of(load(name)).get(spelling(field)) or field.metadata.get("action") or reading_of(field.type).get("type")
    )


def words(name: str, given: dict[str, str]) -> list[str]:
    """A command line of what the command needs and of the fields `given`, by the spellings there: arguments first."""
    places, options = [], []
    for field in dataclasses.fields(load(name)):
        how = field.metadata
        needed = how.get("required") or how.get("positional") and how.get("nargs") not in ("?", "*")
        if not needed and field.name not in given:
            continue
        called = given.get(field.name, spelling(field))
        value = next(iter(how.get("choices") or ["2"]))
        if called.startswith("--"):
            options += [called, value]
        else:
            places.append(value)
    return [*places, *options]


@pytest.mark.parametrize(("name", "field", "was"), OLD, ids=lambda part: getattr(part, "name", part))
def test_an_old_spelling_is_taken_and_not_shown(name, field, was):
    new, old = words(name, {field.name: spelling(field)}), words(name, {field.name: was})
    assert new != old and parse(load(name), name, new) == parse(load(name), name, old)
    assert not re.search(rf"(?<!\S)\[?{was}[\s=]", parser_of(load(name), name).format_help()) or was[:2] != "--"


def test_old_spellings_are_many():
    assert len(OLD) > 30


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["export ct2", "a", "b", "--out", "c"], "unrecognized arguments: b"),
        (["export ct2", "a"], "the following arguments are required: --out"),
        (["export onnx", "a", "b", "--oout", "c"], "did you mean --out?"),
        (["average", "--outpu", "c"], "the following arguments are required: CHECKPOINT"),
        (["score", "x", "--sett", "test"], "unrecognized arguments: --sett test"),
    ],
)
def test_one_line_where_both_or_neither_is_given(given, error, capsys):
    """Of a spelling and an old one; and no line names an old one."""
    name, *argv = given
    with pytest.raises(SystemExit):
        parse(load(name), name, argv)
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1 and "--set " not in said


def test_abbreviations_mean_what_is_shown():
    """Where nothing that is shown begins so, an old spelling is meant."""
    assert parse(load("score"), "score", ["x", "--se", "7"]).seed == 7
    assert parse(load("score"), "score", ["x", "--sa", "7"]).resamples == 7
    given = parse(load("average"), "average", ["--inp", "a", "b", "--outp", "c"])
    assert [str(path) for path in (*given.checkpoints, given.out)] == ["a", "b", "c"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_is_called_by_what_is_done_with_it(name):
    for called, role in roles_of(load(name)).items():
        assert called in PATHS[role].split(), (name, called)


def test_no_command_takes_up_a_spelling_that_was_given_up():
    given_up = {(was, kind_of(name, field)) for name, field, was in OLD}
    taken_up = {(spelling(field), kind_of(name, field)) for name, field in FIELDS} & given_up
    assert {called for called, _ in taken_up} == set(KEPT)


def test_one_line_of_help_is_of_one_spelling():
    found = defaultdict(set)
    for name, field in FIELDS:
        if not str(field.metadata.get("help")).startswith(("None", "default: ", "as in training")):
            found[field.metadata["help"], kind_of(name, field)].add(spelling(field))
    assert {help: names for (help, _), names in found.items() if len(names) > 1} == {}
