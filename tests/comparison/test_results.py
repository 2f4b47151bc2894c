"""Results as single files and as one compressed file: both count, nothing is lost, equal results give equal bytes."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from helpers.results import measured
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import TEMPORARY, write_json
from relpos_fairseq.io.processes import Fork, in_fork
from relpos_fairseq.lab.comparison import results
from relpos_fairseq.lab.comparison.results import ARCHIVE, ResultStore
from relpos_fairseq.lab.comparison.scores import unpack

SETTINGS = {"task": {"kind": "copy"}, "train": {"lr": 1}}


def result(scheme: str, seed: int = 1, **more: object) -> dict:
    own = {"scheme": scheme, "task": "copy", "seed": seed, "settings": SETTINGS, "code": "a"}
    return measured(**own | more)


def store(folder: Path, *found: dict) -> ResultStore:
    made = ResultStore(folder)
    for one in found:
        write_json(made.path(name(one)), one)
    return made


def name(one: dict) -> str:
    return f"copy/{one['scheme']}-seed{one['seed']}-{one['code']}"


def lines(folder: Path) -> list[dict]:
    with gzip.open(folder / ARCHIVE, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_both_forms_count_and_nothing_is_lost(tmp_path):
    rope, none = result("rope"), result("none")
    made = store(tmp_path, rope)
    assert made.read(name(rope)) == rope and made.read(name(none)) is None
    assert made.fold() == 1 and made.files() == []
    write_json(made.path(name(none)), none)
    assert (made.read(name(rope)), made.read(name(none))) == (rope, none)
    other = ResultStore(tmp_path)  # has read nothing yet
    assert other.fold() == 1 and other.fold() == 0
    assert (made.read(name(rope)), made.read(name(none))) == (rope, none)
    assert [line["run"] for line in lines(tmp_path)] == [name(none), name(rope)]


def test_files_of_others_stay(tmp_path):
    made = store(tmp_path, result("rope"))
    write_json(tmp_path / "copy" / "notes.json", {"by": "somebody"})
    assert made.fold() == 1
    assert (tmp_path / "copy" / "notes.json").is_file() and made.files() == [] and len(lines(tmp_path)) == 1


def test_results_that_are_being_written_are_left_alone(tmp_path):
    made = store(tmp_path, result("rope"))
    partial = made.path(f"copy/{TEMPORARY}none-seed1-a")
    partial.write_text('{"scheme": ')
    assert made.fold() == 1 and partial.exists()
    assert made.newest("copy", "none", 1, SETTINGS, "") is None


def test_equal_results_give_equal_bytes(tmp_path):
    some = [result(scheme, seed) for scheme in ("rope", "none") for seed in (1, 2)]
    store(tmp_path / "a", *some).fold()
    late = store(tmp_path / "b", *some[2:])
    late.fold()
    for one in some[:2]:
        write_json(late.path(name(one)), one)
    late.fold()
    assert (tmp_path / "a" / ARCHIVE).read_bytes() == (tmp_path / "b" / ARCHIVE).read_bytes()


def test_two_peoples_files_are_merged_by_concatenation(tmp_path):
    store(tmp_path / "mine", result("rope"), result("none", parameters=1)).fold()
    store(tmp_path / "theirs", result("alibi"), result("none", parameters=2)).fold()
    with (tmp_path / "mine" / ARCHIVE).open("ab") as file:
        file.write((tmp_path / "theirs" / ARCHIVE).read_bytes())
    merged = ResultStore(tmp_path / "mine")
    assert set(merged.archived()) == {name(result(scheme)) for scheme in ("rope", "none", "alibi")}
    assert merged.read(name(result("none")))["parameters"] == 2
    write_json(merged.path(name(result("rope", 2))), result("rope", 2))
    merged.fold()
    assert len(lines(tmp_path / "mine")) == 4


def test_a_kill_loses_nothing(tmp_path, monkeypatch):
    """Before the archive has its name the files are still there; after it, a file that is left counts once."""
    some = [result("rope"), result("none")]
    made = store(tmp_path, *some)

    def killed() -> None:
        monkeypatch.setattr(Path, "unlink", lambda *given, **how: (_ for _ in ()).throw(SystemExit(1)))
        made.fold()

    with pytest.raises(RuntimeError):
        in_fork(killed, tmp_path / "log", "folding")
    assert all(made.read(name(one)) == one for one in some)
    made.fold()
    assert len(lines(tmp_path)) == 2 and made.files() == []


def test_processes_fold_at_the_same_time(tmp_path):
    some = [result("rope", seed) for seed in range(1, 13)]

    def write_and_fold(part: list[dict]) -> None:
        for one in part:
            store(tmp_path, one).fold()

    forks = [Fork(lambda part=some[n::2]: write_and_fold(part), tmp_path / f"{n}.log") for n in range(2)]
    while any(fork.poll() is None for fork in forks):
        time.sleep(0.01)
    assert [fork.status for fork in forks] == [0, 0]
    assert len(lines(tmp_path)) == 12


def test_the_newest_of_other_versions_counts(tmp_path, monkeypatch):
    days = {"x": 2, "b": 3, "y": 1}
    own = [
        result("rope", code=code, finished=f"2026-01-0{day}T00:00:00Z", parameters=day) for code, day in days.items()
    ]
    late = {"code": "z", "finished": "2026-01-09T00:00:00Z"}
    others = result("rope", settings=SETTINGS | {"train": {"lr": 2}}, **late), result("rope-seed1-x", **late)
    made = store(tmp_path, *own, *others)
    for _ in range(2):
        assert made.newest("copy", "rope", 1, SETTINGS, "")["code"] == "b"
        assert made.newest("copy", "rope", 3, SETTINGS, "") is None
        made.fold()
    monkeypatch.setattr(results.time, "gmtime", lambda *given: (2026, 1, 4, 0, 0, 0, 0, 4, 0))
    made.write(name(result("rope", code="c")), result("rope", code="c", parameters=4))
    assert made.newest("copy", "rope", 1, SETTINGS, "")["parameters"] == 4


def test_a_damaged_file_is_named(tmp_path):
    made = store(tmp_path, result("rope"))
    made.fold()
    whole = (tmp_path / ARCHIVE).read_bytes()
    for damaged in (whole[:-20], b"no gzip", gzip.compress(b"{}\n"), gzip.compress(b"[1]\n")):
        (tmp_path / ARCHIVE).write_bytes(damaged)
        with pytest.raises(UserError, match=ARCHIVE):
            ResultStore(tmp_path).archived()


PACKED = {"type": "|u1", "shape": [1, 2], "zlib": "eNpjZAAAAAQAAg=="}
SCORED = {"values": {}, "lengths": PACKED, "statistics": {}, "seconds": 1}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"parameters": -1}, "parameters is -1, and must be a whole number from 0"),
        ({"seconds": -0.5}, "seconds is -0.5, and must be a number from 0"),
        ({"megabytes": "4"}, 'megabytes is "4", and must be a number from 0 or null'),
        ({"validations": [{"valid_loss": 1.0}]}, "validations/0/updates is missing"),
        ({"validations": [{"updates": float("nan")}]}, "validations/0/updates is NaN"),
        ({"validations": [{"updates": 1, "valid_loss": "2"}]}, 'validations/0/valid_loss is "2"'),
        ({"validations": 3}, "validations is 3"),
        ({"sets": {"test": {}}}, "sets/test/lengths is missing"),
        ({"sets": {"test": SCORED | {"lengths": PACKED | {"shape": [-1]}}}}, "sets/test/lengths/shape/0 is -1"),
        ({"sets": {"test": SCORED | {"statistics": {"BLEU": PACKED | {"type": "O"}}}}}, 'BLEU/type is "O"'),
        ({"settings": {"train": {}}}, "settings/task is missing"),
    ],
)
def test_what_no_run_has_measured_is_not_believed(tmp_path, wrong, said):
    one = result("rope", **wrong)
    with pytest.raises(UserError, match=f"{name(one)}.json is not .*{said}.*: delete it, and its run is made again"):
        store(tmp_path, one).read(name(one))
    with pytest.raises(UserError, match=said):
        store(tmp_path, one).fold()
    with (tmp_path / ARCHIVE).open("wb") as file:
        file.write(gzip.compress(json.dumps(one | {"run": name(one)}).encode()))
    with pytest.raises(UserError, match=f"line 1: .*{said}"):
        ResultStore(tmp_path).archived()


def test_losses_that_diverged_and_costs_that_are_unknown_are_results(tmp_path):
    one = result("rope", processor_seconds=None, validations=[{"updates": 2, "valid_loss": float("inf")}])
    assert store(tmp_path, one).read(name(one)) == one


@pytest.mark.parametrize("wrong", [{"zlib": "eNpjZAAAAAQA"}, {"zlib": "?"}, {"shape": [3]}])
def test_a_damaged_array_is_an_error(wrong):
    with pytest.raises(UserError, match="an array of a result is damaged"):
        unpack(PACKED | wrong)
