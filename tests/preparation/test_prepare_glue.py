"""prepare_glue.py: GLUE's layouts, labels, lengths, bad rows, workers, interruptions."""

from __future__ import annotations

import csv
import gzip
import re
import shutil
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from helpers.folders import contents, prepare, prepare_status
from helpers.glue_data import LABELS, LAYOUTS, write_glue, write_tokenizer, write_xnli
from relpos_fairseq.evaluation import classification
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison.protocols import majority
from relpos_fairseq.preparation import glue as binarise
from relpos_fairseq.preparation import glue as stages
from relpos_fairseq.preparation import glue_tasks
from relpos_fairseq.preparation.glue_tasks import GLUE, XNLI, chosen_tasks, sources_of


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, glue, tokenizer) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare("glue", arguments(glue, tokenizer, out))
    return out


def arguments(glue: Path, tokenizer: Path, out: Path, *more: str) -> list[str]:
    return [*(str(glue), "--tokenizer-folder", str(tokenizer), "--out", str(out), "--workers", "1"), *more]


def load(folder: Path, split: str, classes: int):
    """A split as fairseq's task reads it, unshuffled."""
    from fairseq.tasks.sentence_prediction import SentencePredictionTask

    cfg = Namespace(
        data=str(folder),
        num_classes=classes,
        init_token=0,
        separator_token=2,
        no_shuffle=True,
        shorten_method="none",
        shorten_data_split_list="",
        add_prev_output_tokens=False,
        max_positions=512,
        regression_target=classes == 1,
        seed=1,
        d2v2_multi=False,
        classification_head_name="head",
    )
    task = SentencePredictionTask.setup_task(cfg)
    return task, task.load_dataset(split)


@pytest.mark.parametrize("name", LAYOUTS)
def test_fairseq_reads_what_the_files_say(glue, prepared, name):
    task = GLUE[name]
    header, columns = LAYOUTS[name]
    for split in ("valid", "valid1") if name == "MNLI" else ("valid",):
        path = sources_of(task, glue)[split].path
        loaded, dataset = load(prepared / name, split, task.classes)
        rows = list(glue_tasks.read_lines(path))[1 if header else 0 :]
        assert len(dataset) == len(rows)
        for number, line in enumerate(rows):
            fields = line.split("\t")
            parts = [fields[columns.index(part)] for part in ("1", "2") if part in columns]
            item = dataset[number]
            symbols = loaded.source_dictionary.string(item["net_input.src_tokens"], extra_symbols_to_ignore={-1})
            # fairseq's string() leaves </s> out; <s> it leaves in only if asked.
            assert symbols.split() == " ".join(parts).split()
            wanted = [0] + sum(([2] * (n > 0) + [4] * len(part.split()) + [2] for n, part in enumerate(parts)), [])
            ids = item["net_input.src_tokens"].tolist()
            assert [min(i, 4) for i in ids] == wanted
            label = fields[columns.index("L")]
            if task.regression:
                assert item["target"] == [float(label)]
            else:
                assert item["target"].tolist() == [task.labels.index(label)]


def test_label_dictionary_is_in_the_tasks_order(prepared):
    found = Dictionary.load(str(prepared / "RTE" / "label" / "dict.txt"))
    assert found.symbols[found.nspecial :] == LABELS["RTE"]


@pytest.mark.parametrize("layout", ["release", "xtreme"])
def test_xnli_has_a_split_for_every_language(tmp_path, tokenizer, layout):
    root = write_xnli(tmp_path / "data", layout)
    prepare("glue", arguments(root, tokenizer, tmp_path / "out", "--tasks", "xnli"))
    folder = tmp_path / "out" / "XNLI"
    names = {path.stem for path in (folder / "input1").glob("*.idx")}
    more = {"valid_de"} if layout == "release" else set()
    assert names == {"train", "valid", "valid_en", "test_en", "test_de"} | more
    assert len(load(folder, "test_de", 3)[1]) == 8
    assert len(load(folder, "test_en", 3)[1]) == 4
    if layout == "release":
        targets = {item["target"].item() for item in load(folder, "train", 3)[1]}
        assert targets == {XNLI.labels.index("contradiction"), XNLI.labels.index("neutral")}


@pytest.mark.parametrize(
    ("lines", "told", "dropped", "blank"),
    [
        (["", " ", "\t\t\t"], None, 0, 3),
        (["de"], r"line 14: 1 columns where 4 are expected", 1, 0),
        (["d"], r"line 14: 1 columns of 4, and the language 'd': this is no row", 1, 0),
        (["\tneutral\ta cat\ta dog"], r"line 14: 4 columns of 4, and the language '': this is no row", 1, 0),
        (["zz\tneutral\thalf a r"], r"line 14: 3 columns of 4, and the language 'zz'", 1, 0),
        (["neutral\tneutral\ta cat\ta dog"], r"line 14: 4 columns of 4, and the language 'neutral'", 1, 0),
        (["../x\tneutral\ta cat\ta dog"], r"line 14: .* the language '../x'", 1, 0),
        (["de\tneutral\ta cat"], r"line 14: 3 columns where 4 are expected", 1, 0),
        (["en\tneutral\ta cat\ta dog\t"], r"line 14: 5 columns where 4 are expected", 1, 0),
        (["de\t\ta cat\ta dog"], r"line 14: the label is missing", 1, 0),
    ],
)
def test_what_is_no_row_is_told_or_counted(tmp_path, tokenizer, capsys, lines, told, dropped, blank):
    root = write_xnli(tmp_path / "data", "release")
    path = root / "XNLI" / "xnli.dev.tsv"
    path.write_text(path.read_text() + "\n".join(lines))  # the last without its end
    given = arguments(root, tokenizer, tmp_path / "out", "--tasks", "xnli")
    assert prepare_status("glue", given) == (0 if told is None else 2)
    if told is not None:
        assert re.search(rf"xnli\.dev\.tsv, {told}", capsys.readouterr().err)
        prepare("glue", [*given, "--on-bad-row", "drop"])
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if line.startswith("| XNLI") and line.count("|") == 11]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    rows = {split: [int(one) for one in numbers[:3]] for _, split, *numbers in cells}
    assert rows.keys() == {"train", "valid", "valid_en", "valid_de", "test_en", "test_de"}
    assert [rows["valid_en"][0], rows["valid_de"][0], rows["train"][0]] == [4, 8, 12]
    assert rows["valid_en"][1] + rows["valid_de"][1] == dropped and rows["valid_en"][2] + rows["valid_de"][2] == blank
    counted = dict(one.split(": ") for one in next(row[-1] for row in cells if row[1] == "train").split(", "))
    assert sum(map(int, counted.values())) == 12 and counted.keys() == set(XNLI.labels)


def test_languages_in_capitals_and_files_of_both_releases(tmp_path, tokenizer, capsys):
    """Strays count where a language of the file is read; what is not compressed comes before what is."""
    root = write_xnli(tmp_path / "data", "release")
    path = root / "XNLI" / "xnli.dev.tsv"
    path.write_text(path.read_text().replace("\nen\t", "\nEN\t") + "\njunk of a line\n")
    (root / "XNLI" / "dev-de.tsv").write_text("a cat\ta dog\tneutral\n")
    (root / "XNLI" / "dev-de.tsv.gz").write_bytes(gzip.compress(b"a cat\ta dog\tneutral\n" * 3))
    given = arguments(root, tokenizer, tmp_path / "out", "--tasks", "xnli", "--on-bad-row", "drop")
    prepare("glue", given)
    said = capsys.readouterr().out
    table = [line.split("|") for line in said.splitlines() if line.startswith("| XNLI") and line.count("|") == 11]
    rows = {line[2].strip(): [int(one) for one in line[3:6]] for line in table}
    assert rows["valid_en"] == [4, 1, 1] and rows["valid_de"] == [1, 0, 0] and rows["valid"] == [4, 1, 1]


def test_xtremes_own_files_are_quoted_and_its_test_files_have_no_labels(tmp_path, tokenizer):
    root = tmp_path / "data"
    folder = root / "XNLI"
    folder.mkdir(parents=True)
    rows = [('a "red" cat', "the dog", "neutral"), ("a cat", "old, new", "entailment")]
    for name, width in (("train-en", 3), ("dev-en", 3), ("test-en", 2), ("test-de", 2)):
        with (folder / f"{name}.tsv").open("w", newline="") as file:
            csv.writer(file, delimiter="\t").writerows(row[:width] for row in rows)
    texts = tmp_path / "text"
    prepare("glue", [str(root), "--tasks", "xnli", "--text", str(texts)])
    assert texts.read_text() == 'a "red" cat\nthe dog\n\na cat\nold, new\n\n'
    prepare("glue", arguments(root, tokenizer, tmp_path / "out", "--tasks", "xnli"))
    found = tmp_path / "out" / "XNLI"
    assert {path.stem for path in (found / "input1").glob("test_*.idx")} == {"test_en", "test_de"}
    assert classification.xnli_splits(found) == {
        "de": classification.Splits(None, "test_de"),
        "en": classification.Splits("valid_en", "test_en"),
    }


@pytest.mark.parametrize("row", ['"a cat\tb\tneutral', '"a" cat\tb\tneutral'])
def test_wrong_quotes_are_named(tmp_path, tokenizer, capsys, row):
    root = write_xnli(tmp_path / "data", "xtreme")
    path = root / "XNLI" / "dev-en.tsv"
    path.write_text(path.read_text() + row + "\n")
    given = arguments(root, tokenizer, tmp_path / "out", "--tasks", "xnli")
    assert prepare_status("glue", given) == 2
    assert f"{path}, line 5: quotes are not as in CSV" in capsys.readouterr().err


def bert_truncation(first: list[int], second: list[int], room: int) -> None:
    """As google-research/bert's _truncate_seq_pair."""
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(8, 40))
@settings(max_examples=40, deadline=None)
def test_shortening_is_berts(first, second, length):
    parts = np.arange(first), np.arange(second)
    expected = list(range(first)), list(range(second))
    bert_truncation(*expected, length - 4)
    assert tuple(part.tolist() for part in binarise.shorten(parts, length)) == expected
    assert [part.tolist() for part in binarise.shorten(parts, 0)] == [p.tolist() for p in parts]
    assert len(binarise.shorten((parts[0],), length)[0]) == min(first, length - 2)


def test_lengths_are_kept(tmp_path, glue, tokenizer):
    out = tmp_path / "out"
    prepare("glue", arguments(glue, tokenizer, out, "--tasks", "RTE", "--max-length", "9"))
    _, dataset = load(out / "RTE", "train", 2)
    assert max(len(item["net_input.src_tokens"]) for item in dataset) == 9


def test_workers_change_nothing(tmp_path, glue, tokenizer, prepared, monkeypatch):
    monkeypatch.setattr(binarise, "CHUNK", 5)
    tasks = ("MNLI", "STS-B")  # a task has nine pools of processes
    prepare("glue", arguments(glue, tokenizer, tmp_path / "out", "--tasks", ",".join(tasks), "--workers", "3"))
    for task in tasks:
        assert contents(tmp_path / "out" / task) == contents(prepared / task) != {}


def test_interrupted_run_goes_on(tmp_path, glue, tokenizer, prepared, monkeypatch, capsys):
    original, done = binarise.write_task, []

    def interrupted(task, *given):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(task.name)
        return original(task, *given)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_task", interrupted)
        given = arguments(glue, tokenizer, tmp_path / "out")
        assert prepare_status("glue", given) == 130
    prepare("glue", given)
    assert capsys.readouterr().out.count("unchanged") == 3
    assert contents(tmp_path / "out", ".stages") == contents(prepared, ".stages")


def line_error(number: int, text: str) -> str:
    return f"train.tsv, line {number}: {text}"


BAD = {
    "column": (0, "index\tsentence1\tlabel", line_error(1, "there is no column 'sentence2'")),
    "missing": (3, "0\ta cat\ta dog", line_error(4, "3 columns where 4 are expected")),
    "many": (3, "0\ta cat\tx\ty\tentailment", line_error(4, "5 columns where 4 are expected")),
    "empty": (3, "0\ta cat\ta dog\t", line_error(4, "the label is missing")),
    "unknown": (5, "0\ta cat\ta dog\tmaybe", line_error(6, "the label must be one of")),
    "sentence": (5, "0\t\ta dog\tentailment", line_error(6, "the first sentence is empty")),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_are_named_or_dropped(tmp_path, glue, tokenizer, capsys, kind):
    place, line, message = BAD[kind]
    path = tmp_path / "glue" / "RTE" / "train.tsv"
    path.parent.mkdir(parents=True)
    lines = (glue / "RTE" / "train.tsv").read_text().splitlines()
    lines[place] = line
    path.write_text("\n".join(lines))
    (path.parent / "dev.tsv.gz").write_bytes((glue / "RTE" / "dev.tsv.gz").read_bytes())
    given = arguments(tmp_path / "glue", tokenizer, tmp_path / "out")
    assert prepare_status("glue", given) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    if place:
        assert prepare_status("glue", [*given, "--on-bad-row", "drop"]) == 0
        train = next(row for row in capsys.readouterr().out.splitlines() if "train" in row)
        assert [cell.strip() for cell in train.split("|")][3:5] == ["19", "1"]


@pytest.mark.parametrize("score", ["7.0", "-1", "nan", "good"])
def test_scores_are_checked(score):
    with pytest.raises(UserError, match="a number from 0 to 5"):
        glue_tasks._checked_label(score, GLUE["STS-B"])


WRONG = {
    "there is no GLUE task 'WNLY'": ["--tasks", "RTE,WNLY"],
    "--max-length must be 0 or at least 8": ["--max-length", "3"],
    "--workers must be >= 1": ["--workers", "0"],
    "XNLI: there is no folder": ["--tasks", "XNLI"],
    "give --tokenizer-folder and --out": [],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_commands_are_one_line(tmp_path, glue, tokenizer, capsys, message):
    given = arguments(glue, tokenizer, tmp_path / "out", *WRONG[message])
    if not WRONG[message]:
        given = [str(glue)]
    assert prepare_status("glue", given) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]


def test_a_task_without_its_training_file_is_left_out(tmp_path, glue, tokenizer, capsys):
    """QNLI is handed on without train.tsv in places: the other tasks do not wait for it."""
    shutil.copytree(glue / "RTE", tmp_path / "RTE")
    shutil.copytree(glue / "QNLI", tmp_path / "QNLI")
    (tmp_path / "QNLI" / "train.tsv").unlink()
    assert prepare_status("glue", arguments(tmp_path, tokenizer, tmp_path / "out")) == 0
    said = capsys.readouterr()
    assert "warning: QNLI is left out: " in said.err and "train.tsv is missing" in said.err
    assert "RTE" in said.out and not (tmp_path / "out" / "QNLI").exists()
    named = ("--tasks", "QNLI,RTE")
    assert prepare_status("glue", arguments(tmp_path, tokenizer, tmp_path / "no", *named)) == 2


def test_a_missing_file_and_a_foreign_dictionary_are_named(tmp_path, glue, tokenizer, capsys):
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "train.tsv").write_text("x")
    given = arguments(tmp_path, tokenizer, tmp_path / "out", "--tasks", "RTE")
    assert prepare_status("glue", given) == 2
    assert "dev.tsv is missing" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    for text, message in (("red 1\n", "lacks"), ("red\n", "line 1: not `SYMBOL COUNT`")):
        (other / "dict.txt").write_text(text)
        assert prepare_status("glue", arguments(glue, other, tmp_path / "out")) == 2
        assert message in capsys.readouterr().err


def test_sentences_for_pre_training(tmp_path, glue):
    prepare("glue", [str(glue), "--text", str(tmp_path / "text"), "--tasks", "RTE,CoLA"])
    documents = (tmp_path / "text").read_text().strip().split("\n\n")
    assert Counter(len(document.split("\n")) for document in documents) == {2: 20, 1: 20}


@given(st.lists(st.sampled_from("01"), min_size=1), st.lists(st.sampled_from("01"), min_size=1))
@settings(max_examples=30, deadline=None)
def test_majority_class_is_scored_as_sklearn_does(train, valid):
    counts = Counter(train)
    answer = "0" if counts["0"] >= counts["1"] else "1"
    constant = [answer] * len(valid)
    found = majority(GLUE["MRPC"], train, valid)
    assert found["accuracy"] == pytest.approx(100 * accuracy_score(valid, constant))
    f1 = f1_score(valid, constant, pos_label="1", zero_division=0)
    assert found["f1"] == pytest.approx(100 * f1)
    assert majority(GLUE["CoLA"], train, valid)["mcc"] == matthews_corrcoef(valid, constant) == 0
    assert majority(GLUE["STS-B"], ["1.0"], ["2.0"]) == {"spearman": 0.0, "pearson": 0.0}


def test_tasks_are_found_by_any_spelling():
    assert [task.name for task in chosen_tasks("sts-b, sst2,MNLI,mnli")] == ["STS-B", "SST-2", "MNLI"]


@pytest.mark.slow
def test_real_files_are_read_whole(tmp_path, shared_data, tokenizer):
    rows = {"CoLA": (8551, 1043), "MRPC": (3667, 408), "RTE": (2490, 277), "STS-B": (5749, 1500)}
    for name, expected in rows.items():
        sources = sources_of(GLUE[name], shared_data / "glue")
        found = [sum(1 for _ in glue_tasks.read_examples(sources[split], GLUE[name])) for split in ("train", "valid")]
        assert tuple(found) == expected
