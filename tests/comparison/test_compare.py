"""`relpos compare`: specifications, cells, resuming, reports."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT

from helpers import FULL, processes
from helpers.results import measured
from relpos_fairseq.cli.main import main as relpos
from relpos_fairseq.io.errors import BusyError, ToolError, UserError
from relpos_fairseq.io.files import write_json
from relpos_fairseq.io.processes import Fork, in_fork, wait_for
from relpos_fairseq.io.stages import locked
from relpos_fairseq.lab.comparison import run as run_module
from relpos_fairseq.lab.comparison import scheduling, training_run
from relpos_fairseq.lab.comparison.results import ResultStore
from relpos_fairseq.lab.comparison.scheduling import Comparison
from relpos_fairseq.lab.comparison.scores import pack, same_inputs, unpack
from relpos_fairseq.lab.comparison.spec import make_spec
from relpos_fairseq.lab.comparison.tasks.base import Scored, Workspace

SMALL = {
    "seeds": 2,
    "schemes": {"none": None, "near": {"position-scheme": "shaw", "position-clip-distance": 2}},
    "train": {"max-update": 12, "log-interval": 5, "save-interval-updates": 5, "max-tokens": 400},
    "tasks": {
        "copying": {"kind": "copy", "longest": 4, "beyond": 6, "examples": 200, "each": 2},
        "pairs": {"kind": "even_pairs", "longest": 6, "beyond": 12, "examples": 60, "test": 20},
        "scan": {"cutoff": 26, "valid": 20, "test": 12},
        "text": {"kind": "characters", "text": "text.txt", "context": 16, "predictions": 64},
        "corpus": {"kind": "built_in", "pairs_train": 3000, "pairs_valid": 10, "generate": {"beam": 1}}
        | {"pairs_test": 8, "pairs_test_long": 4},
    },
}

COPYING = {"copying": SMALL["tasks"]["copying"]}
GRID = {"kind": "glue", "name": "RTE", "data": "x"}


def write(path: Path, content: dict) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def specified(folder: Path, name: str = "small", **changes: object) -> Path:
    """The file of a comparison on copying alone, but for what is changed."""
    return write(folder / f"{name}.yaml", {**SMALL, "tasks": COPYING, **changes})


def of_copying(folder: Path) -> Comparison:
    """A comparison of two schemes and two seeds on copying."""
    return Comparison(make_spec("s", {**SMALL, "tasks": COPYING}), folder / "work", folder / "results")


def fake_results(comparison: Comparison, runs: list | None = None, seconds: float = 3.5) -> None:
    """Write results as if every run had been made, or some."""
    for number, run in enumerate(runs or comparison.runs):
        generator = np.random.default_rng(number)
        level = 0.3 + 0.5 * (run.scheme != "none")
        sets = {}
        for name in run.task.sets():
            right = (generator.random(60) < level).astype(int)
            rows = np.stack([right, np.ones(60, int)], 1)
            scored = Scored(np.arange(60) % 20 + 1, {"exact match": rows})
            sets[name] = run_module.packed_scores(scored) | {"seconds": 1.0}
        own = {"scheme": run.scheme, "task": run.task.label, "seed": run.seed, "settings": run.settings}
        own |= {"code": comparison.code, "processor": "Pen and Paper, AVX512", "unit": "symbols", "sets": sets}
        write_json(comparison.store.path(run.name(comparison.code)), measured(**own, seconds=seconds))


@pytest.fixture
def reported(tmp_path, shell) -> Path:
    """A folder with the report of eight seeds."""
    fake_results(Comparison.of(specified(tmp_path, title="Which <scheme>?", seeds=8, schemes=["none", "t5", "alibi"])))
    shell("compare report small.yaml")
    return tmp_path / "small"


def test_the_report_has_everything(reported):
    document = (reported / "report.md").read_text()
    assert "# Which &lt;scheme>?" in document
    bold = r"\*\*\+\d+\.\d \[\d+\.\d, \d+\.\d\]\*\*"
    assert re.search(rf"\| t5 .*\| {bold} .*\| 0\.008 +\|", document)
    assert "| runs" in document and "24 of 24 done" in document
    assert re.search(r"^\| processors +\| Pen and Paper, AVX512: 24 runs", document, re.M)
    assert re.search(r"^- copying, exact match on \S+, to none: t5 \+", document, re.M)
    rows = (reported / "report.csv").read_text().splitlines()
    # two sets; a line a scheme and a line a difference to the baseline
    assert len(rows) == 1 + 2 * (3 + 2)
    page = (reported / "report.html").read_text()
    assert "<script" not in page and "http" not in page and "Which &lt;scheme&gt;?" in page
    assert page.count("<svg") == 2 and "#000" not in page  # black would be lost on a dark page
    # in each of two pictures a curve a scheme, and its sample in the legend
    assert page.count("stroke-width: 1.4") == 2 * 3 * 2
    assert all(page.count(f">{name}</text>") == 2 for name in ("none", "t5", "alibi"))


def test_labels_are_text_in_every_report(tmp_path, shell):
    labels = ["=1+1", "a|b", "@x", "a\nb <script>", "[x](javascript:y)"]
    odd = {"title": "a\n# b | <img>", "tasks": {"-1+cmd|x": COPYING["copying"]}}
    schemes = {label: {"position-scheme": "none"} for label in labels}
    fake_results(Comparison.of(specified(tmp_path, "odd", schemes=schemes, **odd)))
    shell("compare report odd.yaml")
    document = (tmp_path / "odd" / "report.md").read_text()
    tables = [block.splitlines() for block in document.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4 and all(len({len(re.findall(r"(?<!\\)\|", row)) for row in one}) == 1 for one in tables)
    assert "| a b &lt;script>" in document and "# a # b" in document
    assert "<script" not in document and "<img" not in document and "[x](" not in document.replace(r"\[x\](", "")
    with (tmp_path / "odd" / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["scheme"] for row in rows} == {"'=1+1", "a|b", "'@x", "a\nb <script>", "[x](javascript:y)"}
    assert {row["task"] for row in rows} == {"'-1+cmd|x"}
    assert all(re.match(r"[-\d]", row["difference"]) for row in rows if row["difference"])


def test_one_seed_is_said_in_words_too(tmp_path, shell):
    fake_results(Comparison.of(specified(tmp_path, seeds=1, schemes=["none", "t5"])))
    said = shell("compare report small.yaml")
    assert "1 seed is too few" in said and "with 1 seed and 1 comparison not even" in said
    assert not re.search(r"(?<!\d)1 \w+s (is|are|and|of|not)\b", said)


def test_few_seeds_are_warned_of(tmp_path, shell, capsys):
    comparison = Comparison.of(specified(tmp_path, seeds=3, schemes=["none", "t5"]))
    fake_results(comparison)
    comparison.store.path(comparison.runs[-1].name(comparison.code)).unlink()
    said = shell("compare report small.yaml")
    assert "Not finished: 5 of 6 runs" in said
    assert said.count("2 seeds are too few") == said.count("6 seeds would be needed") == 1  # of two tables
    assert "- No difference survives the test: in none of 2 tables" in said
    assert relpos(["compare", "status", "small.yaml"]) == 1
    assert "copying / t5: 2 of 3" in capsys.readouterr().out


def test_results_of_other_code_count_if_asked(tmp_path, shell, capsys):
    one = {"seeds": 1, "schemes": ["none"], "tasks": {"text": {"kind": "characters", "context": 16}}}
    comparison = Comparison.of(specified(tmp_path, **one))
    comparison.code = "older"
    fake_results(comparison)
    assert relpos(["compare", "status", "small.yaml"]) == 1
    shell("compare status small.yaml --any-code")
    specified(tmp_path, **one, train={"lr": 0.5})
    assert relpos(["compare", "status", "small.yaml", "--any-code"]) == 1
    for asked, advised in (([], True), (["--any-code"], False)):
        assert relpos(["compare", "report", "small.yaml", *asked]) == 2
        assert ("--any-code" in capsys.readouterr().err) is advised


def test_results_of_other_data_do_not_count(tmp_path, shell, monkeypatch):
    """Also of another version of the code; where a result does not record its data's input, it counts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a line\n" * 20)
    text = {"kind": "characters", "text": "text.txt", "context": 16}
    specified(tmp_path, seeds=1, schemes=["none"], tasks={"text": text})

    def results(inputs: dict) -> None:
        comparison = Comparison.of(Path("small.yaml"))
        comparison.code = "older"
        fake_results(comparison)
        path = comparison.store.path(comparison.runs[0].name("older"))
        write_json(path, json.loads(path.read_text()) | inputs, renews=True)

    results({"inputs": Comparison.of(Path("small.yaml")).runs[0].task.hash_inputs()})
    shell("compare status small.yaml --any-code")
    (tmp_path / "text.txt").write_text("another line\n" * 20)
    assert relpos(["compare", "status", "small.yaml", "--any-code"]) == 1
    results({})
    shell("compare status small.yaml --any-code")


@pytest.mark.parametrize("file", ("text.txt", "table.txt"))
def test_what_changes_after_it_was_named_is_not_read(file, tmp_path, monkeypatch):
    """Its result would stand under the name of what was there before."""
    monkeypatch.chdir(tmp_path)
    for name in ("text.txt", "table.txt"):
        (tmp_path / name).write_text("a line\n" * 20)
    schemes = {"x": {"position-scheme": "shaw", "decoder-embed-path": "table.txt"}}
    content = {**SMALL, "tasks": {"text": SMALL["tasks"]["text"]}, "schemes": schemes}
    comparison = Comparison(make_spec("s", content), tmp_path / "work", tmp_path / "results")
    run = comparison.runs[0]
    comparison.result(run)
    (tmp_path / file).write_text("another line\n" * 20)
    with pytest.raises(UserError, match="text / x / seed 1 .* has changed"):
        run.finish(comparison.work, comparison.store, comparison.code)


@pytest.mark.parametrize("gone", (False, True))
def test_data_that_change_while_they_are_made_are_not_kept(gone, tmp_path):
    """They would lie under the name of what was there before, where a later command finds them."""
    text = tmp_path / "text.txt"
    text.write_text("a line\n" * 20)
    content = {**SMALL, "tasks": {"text": {**SMALL["tasks"]["text"], "text": str(text)}}}

    def comparison() -> Comparison:
        return Comparison(make_spec("s", content), tmp_path / "work", tmp_path / "results")

    made = comparison()
    made.missing()
    text.write_text("another line\n" * 20)
    with pytest.raises(UserError, match="text reads has changed"):
        made.prepare(made.runs)
    text.write_text("a line\n" * 20)
    made = comparison()
    made.prepare(made.runs)
    assert "a n o" not in (made.runs[0].task.data_folder(made.work) / "raw" / "train").read_text()
    if gone:
        text.unlink()
        with pytest.raises(UserError, match="has changed"):
            made.runs[0].finish(made.work, made.store, made.code)


def test_a_result_is_of_the_inputs_that_it_began_with(tmp_path, monkeypatch):
    """Though they are replaced while it trains: with --any-code it would count as made of the new ones."""
    text = tmp_path / "text.txt"
    text.write_text("a line\n" * 20)
    content = {**SMALL, "tasks": {"text": {**SMALL["tasks"]["text"], "text": str(text)}}}
    comparison = Comparison(make_spec("s", content), tmp_path / "work", tmp_path / "results")
    run = comparison.runs[0]
    before = run.task.hash_inputs()

    def stages(*_):
        text.write_text("another line\n" * 20)
        return {"train": {}, **{f"score-{name}": {} for name in run.task.sets()}}

    written = {}
    monkeypatch.setattr(run_module, "run_stages", stages)
    monkeypatch.setattr(comparison.store, "write", lambda _, result: written.update(result))
    comparison.prepare([run])
    run.finish(comparison.work, comparison.store, comparison.code)
    assert written["inputs"] == before != run.task.hash_inputs()


def test_a_job_may_start_in_another_folder(tmp_path, monkeypatch):
    """What a specification's tasks read is found there too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a line\n" * 20)
    task = make_spec("s", {**SMALL, "tasks": {"text": SMALL["tasks"]["text"]}}).tasks["text"]
    named = task.inputs_key
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert not task.has_changed() and task.hash_inputs() == named


def test_seeds_of_a_stranger_lie_where_the_others_put_them(tmp_path, shell):
    """`--seeds` makes runs of other seeds only, and says of each where the file's put it, and who ran them."""
    spec = specified(tmp_path, seeds=6, schemes=["none", "t5"])
    fake_results(Comparison.of(spec))
    other = Comparison.of(spec, seeds="101,102")
    assert [run.seed for run in other.runs] == [101, 101, 102, 102] and len(other.missing()) == 4
    fake_results(other)
    worst = other.store.path(other.runs[3].name(other.code))
    made = json.loads(worst.read_text())
    for scored in made["sets"].values():
        scored["statistics"]["exact match"] = pack(np.stack([np.zeros(60, int), np.ones(60, int)], 1))
    write_json(worst, made, renews=True)
    lines = shell("compare run small.yaml --seeds 101,102").splitlines()[-4:]
    assert [line.split(":")[0] for line in lines] == [run.title for run in other.runs]
    for line in lines[:3]:
        assert line.count("within [") == 2 and "OUTSIDE" not in line
    assert lines[3].count("exact match 0.0, OUTSIDE [") == 2
    assert all(line.endswith("(on Pen and Paper, AVX512; 6 seeds on Pen and Paper, AVX512)") for line in lines)
    assert not Comparison.of(spec).missing()
    alone = specified(tmp_path, "alone", seeds=[7], schemes=["none", "t5"])
    fake_results(Comparison.of(alone, seeds="8"))
    assert "and 0 seeds to compare it with (on Pen" in Comparison.of(alone, seeds="8").compared()[0]
    said = "--seeds takes whole numbers separated by commas, say 101,102, got '1,a'"
    assert said in shell.refused("compare run small.yaml --seeds 1,a")
    for line in ("run small.yaml --seeds 0", "run small.yaml --seeds 3,3", "report small.yaml --seeds 101"):
        shell.refused(f"compare {line}")


def test_equal_inputs_are_one_example(tmp_path, shell):
    """Twenty copies of three inputs have the intervals of three examples, and the report says so."""
    found = {}
    for name, copies in (("once", 1), ("often", 20)):
        comparison = Comparison.of(specified(tmp_path, name, seeds=6, schemes=["none", "t5"]))
        fake_results(comparison)
        for path in comparison.store.files():
            made = json.loads(path.read_text())
            for scored in made["sets"].values():
                right = unpack(scored["statistics"]["exact match"])[:3].repeat(copies, 0).astype(int)
                scored["statistics"]["exact match"] = pack(right)
                scored["lengths"] = pack(np.arange(3).repeat(copies))
                if copies > 1:
                    scored["inputs"] = pack(same_inputs([f"prompt {n}" for n in np.arange(3).repeat(copies)]))
            write_json(path, made, renews=True)
        said = shell(f"compare report {name}.yaml")
        found[name] = (tmp_path / name / "report.csv").read_text()
    assert found["once"] == found["often"]
    assert "(60 examples of 3 distinct inputs; higher is better)" in said


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(reported, tmp_path, width):
    """Chromium draws it; nothing is wider than the window, and no cell or table than its place."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium: Debian's package of that name has it")
    page = (reported / "report.html").read_text()
    said = (
        "document.title = [document.documentElement.scrollWidth, innerWidth, "
        "document.querySelectorAll('svg').length, [...document.querySelectorAll('.scroll, th, td, p, li')]"
        ".filter(one => one.scrollWidth > one.clientWidth + 1).length].join()"
    )
    told = 'onload="document.title = this.contentDocument.title"'
    (tmp_path / "inner.html").write_text(page.replace("</body>", f"<script>{said}</script></body>"))
    (tmp_path / "outer.html").write_text(f'<iframe width="{width}" height="1800" src="inner.html" {told}></iframe>')
    outer, own = f"file://{tmp_path}/outer.html", f"--user-data-dir={tmp_path / 'profile'}"
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files"
    run = [browser, *flags.split(), own]
    done = subprocess.run([*run, "--dump-dom", outer], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\d+),(\d+),(\d+),(\d+)</title>", done.stdout)
    assert found, done.stdout[:2000] + done.stderr[-2000:]
    assert int(found[1]) <= int(found[2]) == width and int(found[3]) == 2 and int(found[4]) == 0
    picture = tmp_path / f"{width}.png"
    shot = [*run, f"--screenshot={picture}", f"--window-size={max(width + 20, 500)},1820", outer]
    subprocess.run(shot, capture_output=True, timeout=120, check=True)
    assert picture.stat().st_size > 20_000


# What a specification has in place of SMALL's, or as its whole text, and what is said of it.
WRONG = [
    ({"scheme": ["none"]}, "a comparison has no scheme; known: title, baseline"),
    ({"schemes": []}, "schemes is empty"),
    ({"tasks": {}}, "tasks is empty"),
    ({"tasks": {"text": {"kind": "memory"}}}, "task text: kind memory needs data"),
    ({"pairs": [[["a"], "none"]]}, "pairs must be baseline, all, or a list"),
    ({"pairs": [["none", "none"]]}, "pairs must be baseline, all, or a list"),
    ({"seeds": 0}, "seeds must be a number above 0"),
    ({"seeds": [1, 1]}, "a list of different ones"),
    ({"seeds": 100_000_000_000}, "seeds must be at most 1,000"),
    ({"seeds": -1}, "seeds must be a number above 0"),
    ({"seeds": True}, "seeds is true, and must be a whole number or a list"),
    ({"seeds": [2**40]}, "seeds must be whole numbers from 1 to"),
    ({"title": ["a"]}, 'title is ["a"], and must be'),
    ({"train": {"lr": float("nan")}}, "train/lr is NaN, and must be"),
    ({"schemes": {"near": [1]}}, "schemes/near is [1], and must be"),
    ({"tasks": {"x": {"kind": "copy", "longest": "4"}}}, 'task x: longest is "4", and must be a whole'),
    ({"tasks": {"x": {"kind": ["copy"]}}}, "task x: there is no kind ['copy']"),
    ({"baseline": "t5"}, "baseline t5 is none of the schemes: none, near"),
    ({"pairs": [["none", "t5"]]}, "pairs must be baseline, all, or a list"),
    ({"pairs": [["none", "near"], ["near", "none"]]}, "pairs must be different ones"),
    ({"tasks": {"a/b": {"kind": "copy"}}}, "'a/b' cannot be the name of a folder"),
    ({"tasks": {"x": {"kind": "copy", "lr": [1]}}}, "task x: kind copy has no lr"),
    ({"tasks": {"x": {**GRID, "lr": [1.0]}, "x-lr1-epochs3": GRID}}, "two tasks would be called x-lr1-epochs3: choose"),
    ({"tasks": {"x": {}}}, "task x: there is no kind 'x'"),
    ({"tasks": {"x": {"kind": "copy", "train": [1]}}}, "task x: train is [1], and must be an object"),
    ({"tasks": {"x": {"kind": "copy", "generate": {1: 2}}}}, "generate is 1, and must be a text as a key"),
    ("seeds: 1\nseeds: 2\n", "'seeds' is named twice"),
    ("a: [", "is not the YAML that is expected"),
]


@pytest.mark.parametrize(("content", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_specifications(content: dict | str, said: str, tmp_path, shell):
    text = content if isinstance(content, str) else yaml.safe_dump(SMALL | content, sort_keys=False)
    (tmp_path / "wrong.yaml").write_text(text)
    assert said in shell.refused("compare run wrong.yaml")


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "none.yaml": "none.yaml",
        "small.yaml --workers 0": "--workers must be >= 1, got 0",
        "small.yaml --threads 0": "--threads must be >= 1, got 0",
    }.items(),
)
def test_wrong_commands(line: str, said: str, tmp_path, shell):
    specified(tmp_path)
    assert said in shell.refused(f"compare status {line}")


def test_runs_are_named_by_all_that_they_depend_on(tmp_path):
    """Scheme's flags, task, shared flags, seed, code."""

    def names(content, code="c") -> set[str]:
        return {run.name(code) for run in run_module.runs_of(make_spec("s", content))}

    small = {**SMALL, "tasks": COPYING}
    assert len(names(small)) == 4 and names(small) == names({**small, "title": "other"})
    for changed in (
        {**small, "train": {**SMALL["train"], "lr": 0.5}},
        {**small, "tasks": {"copying": {**small["tasks"]["copying"], "symbols": 7}}},
    ):
        assert not names(small) & names(changed)
    assert not names(small) & names(small, "d")


def test_checkpoints_count_by_their_weights(tmp_path):
    """Two machines write other bytes: a conversion's record says how far outputs lay apart there."""
    import torch

    def name(weights: dict, **beside) -> str:
        torch.save({"model": weights, "args": None, "cfg": {"model": {}}, **beside}, tmp_path / "model.pt")
        scheme = {"x": {"finetune-from-model": str(tmp_path / "model.pt")}}
        return run_module.runs_of(make_spec("s", {**SMALL, "tasks": COPYING, "schemes": scheme}))[0].name("c")

    table = torch.arange(6.0).reshape(2, 3)
    weights = {"a": table, "b": torch.tensor(1)}
    first = name(weights)
    assert first == name(weights, conversion={"differences": {"features": 2.7e-6}})
    assert first == name({"b": torch.tensor(1), "a": table.T.contiguous().T})
    others = (
        {"a": table.reshape(3, 2), "b": torch.tensor(1)},
        {"a": table.int(), "b": torch.tensor(1)},
        {"c": table, "b": torch.tensor(1)},
        {"a": table + (table == 5) * 2**-20, "b": torch.tensor(1)},
        {"a": table, "b": torch.tensor(1.0)},
        {"a": table.bfloat16(), "b": torch.tensor(1)},
        {"a": table},
        weights | {"c": torch.empty(0)},
    )
    named = [name(other) for other in others]
    assert len({first, *named}) == len(others) + 1
    assert first == name(weights | {"c._extra_state": None})  # no model here has one


@pytest.mark.parametrize("flag", ("restore-file", "continue-once", "encoder-embed-path", "tokenizer-folder"))
def test_files_that_flags_name_count_by_their_content(flag, tmp_path):
    def name(place: object) -> str:
        scheme = {"x": {"position-scheme": "shaw", flag: place}}
        return run_module.runs_of(make_spec("s", {**SMALL, "tasks": COPYING, "schemes": scheme}))[0].name("c")

    names = []
    for folder in "abc":
        place = tmp_path / folder
        place.mkdir()
        (place / "file").write_text("other" if folder == "c" else "same")
        names.append(name(str(place if flag.endswith("folder") else place / "file")))
    assert names[0] == names[1] != names[2]
    assert len({name(""), name(False), name(str(tmp_path / "missing"))}) == 3  # left to fairseq-train


def test_a_checkpoint_of_all_trainings_may_be_left_out():
    content = {**SMALL, "tasks": COPYING, "train": {"finetune-from-model": "none.pt"}}
    scratch = {"scratch": {"position-scheme": "shaw", "finetune-from-model": False}}
    run = run_module.runs_of(make_spec("s", {**content, "schemes": scratch}))[0]
    assert run.settings["train"]["finetune-from-model"] == "False"


@pytest.mark.parametrize("place", (None, 5, ["model.pt"], "."))
def test_checkpoints_are_named_by_a_path(place, tmp_path, capfd):
    content = {**SMALL, "tasks": COPYING, "schemes": {"x": {"finetune-from-model": place}}}
    assert relpos(["compare", "status", str(write(tmp_path / "spec.yaml", content)), "--work", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert f"there is no checkpoint {place}: train or convert it" in said and "Traceback" not in said


def test_cut_checkpoints_are_not_resumed(tmp_path):
    import torch

    torch.save({"a": torch.zeros(1000)}, tmp_path / "checkpoint_last.pt")
    assert training_run.resumable(tmp_path)
    whole = (tmp_path / "checkpoint_last.pt").read_bytes()
    (tmp_path / "checkpoint_best.pt").write_bytes(whole[:-30])
    assert not training_run.resumable(tmp_path)
    assert not training_run.resumable(tmp_path / "none")


def test_a_training_that_ended_makes_no_further_update(tmp_path):
    """A kill may come between fairseq's last checkpoint and the note of it: fairseq would go on by one update."""
    train = {"lr-scheduler": "fixed", "max-update": 4, "save-interval-updates": 2}
    tasks = {"copying": COPYING["copying"] | {"train": train}}
    spec = write(tmp_path / "one.yaml", {"seeds": [1], "schemes": ["none"], "tasks": tasks})
    comparison = Comparison.of(spec, tmp_path / "work")
    (run,) = comparison.runs
    comparison.prepare([run])
    workspace = Workspace(run.task, run.task.data_folder(comparison.work), comparison.folder(run))
    first = training_run.train(workspace, run.flags)
    weights = workspace.model.read_bytes()
    assert first["validations"][-1]["updates"] == 4
    assert training_run.train(workspace, run.flags) == first
    assert workspace.model.read_bytes() == weights
    notes, log = (workspace.folder / f"train.{ending}" for ending in ("seconds", "log"))
    begun, *rest = notes.read_text().split("\n")
    assert begun.startswith("begun ") and len(rest) == 2
    notes.write_text(f"begun {log.stat().st_mtime - 7:.1f}\n")  # of a process that was killed nothing else is left
    killed = training_run.train(workspace, run.flags)
    assert killed["seconds"] == pytest.approx(7, abs=0.2)
    assert killed["processor_seconds"] is None and killed["megabytes"] is None
    (workspace.folder / "train.log").rename(tmp_path / "gone.log")
    anew = training_run.train(workspace, run.flags)  # its log was lost: what is not known is made again
    assert anew["validations"] == first["validations"] and anew["parameters"] == first["parameters"]
    longer = training_run.train(workspace, {**run.flags, "max-update": 5})
    assert longer["validations"][-1]["updates"] == 5


def test_what_a_killed_training_took_is_summed_as_far_as_it_is_known(tmp_path):
    path = tmp_path / "train.seconds"
    for content, seconds, processor, megabytes, begun in (
        ("begun 9\n2.5 2.0 300\nbegun 20\n1.5 1.0 200\n", 4.0, 3.0, 300, 0),
        ("begun 9\n2.5\nbegun 20\n1.5 1.0 200\n", 4.0, None, 200, 0),
        ("2.5 2.0\nbegun 20\n", 2.5, 2.0, None, 20),  # of an earlier version, and one that is at work or was killed
        ("", 0.0, None, None, 0),
    ):
        path.write_text(content)
        assert training_run.Costs.of(path) == training_run.Costs(seconds, processor, megabytes, begun)
    path.write_text("2.5 x 300\n")
    with pytest.raises(UserError, match="train.seconds is not a note of what a training took"):
        training_run.Costs.of(path)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    comparison = of_copying(tmp_path)

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device", "checkpoint_last.pt")

    monkeypatch.setattr(run_module.Run, "finish", full)
    with pytest.raises(SystemExit):
        comparison.finish(comparison.runs[0])
    assert "No space left on device" in comparison.failure(comparison.runs[0])
    assert comparison.failure(comparison.runs[1]) is None


def test_forks_leave_nothing_behind(tmp_path, monkeypatch):
    log = tmp_path / "log"
    closed = logging.StreamHandler((tmp_path / "closed").open("w"))
    closed.stream.close()
    monkeypatch.setattr(logging.root, "handlers", [closed])

    def fails():
        print("some words")
        raise ValueError("no")

    with pytest.raises(ToolError, match="it: ValueError: no .its whole output: .*log"):
        in_fork(fails, log, "it")
    assert "some words" in log.read_text()
    with pytest.raises(ToolError, match="it: killed by SIGKILL"):
        in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL), log, "it")
    fork = in_fork(lambda: bytearray(80 << 20), log, "it")
    assert fork.status == 0 and fork.megabytes > 80
    full = Fork(lambda: print("no room"), Path("/dev/full"))
    assert end_of(full) == 1
    slow = Fork(lambda: time.sleep(60), log)
    assert slow.poll() is None
    slow.end()
    assert slow.status == -signal.SIGKILL


def test_what_remains_of_runs_at_work(tmp_path, capsys):
    """By the first updates, by runs that have ended, and for those that wait."""
    comparison = of_copying(tmp_path)
    run, other, *rest = comparison.runs
    pool = scheduling.ProcessPool(comparison, [other])
    pool.active[None] = run
    log = comparison.folder(run) / "train.log"
    log.parent.mkdir(parents=True)
    assert pool.note() == f"{run.title}: begins (its log has a line every 5 updates)"
    for updates, left, all_in in ((3, "90 s left", "4 min"), (12, "scored now", "2 min")):
        values = {"num_updates": updates, "loss": "2.5", "wps": "9", "wall": "30" if updates == 3 else "120"}
        log.write_text(f"x | INFO | train_inner | {json.dumps(values)}\n")
        at = f"update {updates} of 12, training loss 2.5, {left}"
        assert pool.note() == f"all in about {all_in}; {run.title}: {at}"
    limit, run.flags["max-update"] = run.flags["max-update"], 0
    assert pool.note().endswith(f"{run.title}: update 12, training loss 2.5")
    run.flags["max-update"] = limit
    fake_results(comparison, [run], 60.0 - len(run.task.sets()))
    assert comparison.durations() == [60.0] and not capsys.readouterr().out
    comparison.prepare = lambda runs: None
    assert comparison.run(lambda _, runs: {}) == 0
    said = "4 runs, 3 to do, about 3 min by the others\n"
    said += "warning: copying: max-update ends within warmup-updates: no training reaches its learning rate\n"
    assert capsys.readouterr().out == said
    run.flags["warmup-updates"] = 11
    assert not run.never_warm


def test_a_run_of_another_process_is_no_failure(tmp_path, monkeypatch, capsys):
    """Two commands share one comparison: what the other has at work is waited for, and counts."""
    monkeypatch.setattr(scheduling, "RETRY", 0.3)
    comparison = of_copying(tmp_path)
    other, own, done = comparison.runs[:3]
    fake_results(comparison, [done])  # since this command began

    def finish(self, work, store, code, *rest):
        with locked(self.folder(work, code), wait=False):
            fake_results(comparison, [self])

    monkeypatch.setattr(type(own), "finish", finish)

    def at_work():
        with locked(comparison.folder(other), wait=False):
            started.touch()
            while comparison.store.read(own.name(comparison.code)) is None:
                time.sleep(0.01)
            fake_results(comparison, [other])

    started = tmp_path / "started"
    fork = Fork(at_work, tmp_path / "log")
    while not started.exists():
        time.sleep(0.01)
    assert scheduling.ProcessPool(comparison, [done, other, own]).run() == {}
    assert end_of(fork) == 0
    out = capsys.readouterr().out
    assert out.count("another process is at it") == 1
    assert f"[1/3] {done.title}: finished by another process" in out
    assert out.index(f"[2/3] {own.title}") < out.index(f"[3/3] {other.title}: finished by another process")


def test_a_job_says_that_another_process_has_its_run(tmp_path, monkeypatch):
    comparison = of_copying(tmp_path)
    run = comparison.runs[0]

    def busy(*given):
        raise BusyError("another process is preparing it")

    monkeypatch.setattr(type(run), "finish", busy)
    monkeypatch.setattr(scheduling, "prepare_process", lambda: None)
    with pytest.raises(RuntimeError, match="another process is at it: run the same command again later"):
        scheduling.finish_job(comparison, run)
    assert comparison.failure(run) is None


@pytest.mark.parametrize("told", [True, False])
def test_a_wait_ends_with_the_first_child(told, tmp_path, monkeypatch):
    """Where the system tells of it; elsewhere after the time that is given."""
    if not told:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    forks = [Fork(lambda: time.sleep(60), tmp_path / "long"), Fork(lambda: time.sleep(0.1), tmp_path / "short")]
    began = time.monotonic()
    wait_for(forks, 20 if told else 0.01)
    assert forks[0].poll() is None and time.monotonic() - began < 10
    assert not told or not hasattr(os, "pidfd_open") or forks[1].poll() == 0
    for fork in forks:
        fork.end()
    wait_for(forks, 60)  # they have ended


def test_a_wait_takes_any_descriptor(tmp_path):
    """`select` knows no number above 1,023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 3000:
        pytest.skip(f"a process may open {limits[1]} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        fork = Fork(lambda: time.sleep(0.1), tmp_path / "log")
        wait_for([fork], 60)
        assert end_of(fork) == 0
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def end_of(fork):
    while fork.poll() is None:
        time.sleep(0.01)
    return fork.status


def any_stands_in(folder: Path) -> bool:
    """Say whether a process has this working folder."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if link.readlink() == folder:
                return True
    return False


@pytest.mark.slow
def test_a_comparison_survives_a_kill(tmp_path, monkeypatch, capsys):
    """Killed in the middle it goes on; one bad scheme is named and stops no other."""
    content = {**SMALL, "seeds": 1, "schemes": ["none", "nonsense"]}
    content["tasks"] = {name: SMALL["tasks"][name] for name in (SMALL["tasks"] if FULL else ("copying", "corpus"))}
    tasks = len(content["tasks"])
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 60)
    spec = write(tmp_path / "small.yaml", content)
    given = [sys.executable, "-m", "relpos_fairseq.cli", "compare", "run", spec, "--workers", "2", "--work", "work"]
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    first = subprocess.Popen(given, **how, stdout=subprocess.PIPE, text=True)
    for line in first.stdout:
        if line.startswith(f"[{tasks}/"):  # when the last task begins
            break
    first.kill()
    first.wait()
    for _ in range(30):  # children notice within half a second
        if not any_stands_in(tmp_path):
            break
        time.sleep(0.05)
    else:
        pytest.fail("processes outlive the one that began them")
    results = ResultStore(tmp_path / "small").files()  # a run that was killed as it wrote has a temporary file beside
    kept = {path: path.read_text() for path in results}
    assert kept
    done = processes.run(given, **how)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{2 * tasks} runs, {2 * tasks - len(kept)} to do" in done.stdout
    assert all(path.read_text() == text for path, text in kept.items())
    assert len(list((tmp_path / "small").rglob("*.json"))) == tasks
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert len(failed) == tasks and all("unknown position scheme" in line for line in failed)
    one = json.loads(next((tmp_path / "small" / "corpus").glob("*.json")).read_text())
    assert set(one["sets"]["test"]["values"]) == {"BLEU", "chrF"} and one["parameters"] > 10**6
    assert one["validations"][-1]["updates"] == 12
    assert all(json.loads(text)["megabytes"] > 100 for text in kept.values())  # a kill may come before it is noted
    assert not list((tmp_path / "work").rglob("*.pt"))
    # the same runs on another machine: nothing to do but the failed ones
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "small", moved / "small")
    shutil.copy(tmp_path / "text.txt", moved)
    write(moved / "small.yaml", {**content, "schemes": ["none"]})
    monkeypatch.chdir(moved)
    assert relpos(["compare", "status", "small.yaml"]) == 0
    assert f"{tasks} of {tasks} runs done" in capsys.readouterr().out


@pytest.mark.slow
def test_jobs_of_a_cluster(tmp_path):
    """Submitit's jobs in this process in place of Slurm's; with RELPOS_ONNX=full in processes of its own."""
    pytest.importorskip("submitit")
    spec = specified(tmp_path, seeds=1, schemes=["none", "nonsense"], slurm={"timeout_min": 5})
    comparison = Comparison.of(spec, work=tmp_path / "work")
    assert scheduling.run_jobs(comparison, "local" if FULL else "debug") == 1
    done = [comparison.result(run) is not None for run in comparison.runs]
    assert done == [True, False] and "nonsense" in comparison.failure(comparison.runs[1])
