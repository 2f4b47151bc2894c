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
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from helpers.folders import contents, prepare, prepare_status, refused
from helpers.glue_data import LABELS, LAYOUTS, write_glue, write_tokenizer, write_xnli
from relpos_fairseq.evaluation import classification
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison.protocols import majority
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


def table(said: str, task: str) -> dict[str, list[str]]:
    """The cells behind each split of a task in the table that is printed."""
    lines = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith(f"| {task}")]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) == 10]
    return {split: cells for _, split, *cells in rows}


def load(folder: Path, split: str, classes: int):
    """A split as fairseq's task reads it, unshuffled."""
    names = {"data": str(folder), "classification_head_name": "head", "num_classes": classes}
    symbols = {"init_token": 0, "separator_token": 2, "add_prev_output_tokens": False, "max_positions": 512}
    shorten = {"shorten_method": "none", "shorten_data_split_list": "", "no_shuffle": True, "seed": 1}
    cfg = Namespace(**names, **symbols, **shorten, regression_target=classes == 1, d2v2_multi=False)
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
        for line, item in zip(rows, dataset, strict=True):
            fields = line.split("\t")
            parts = [fields[columns.index(part)] for part in ("1", "2") if part in columns]
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
    ("line", "told"),
    [
        ("\n \n\t\t\t", None),  # three blank lines
        ("de", r"line 14: 1 columns where 4 are expected"),
        ("d", r"line 14: 1 columns of 4, and the language 'd': this is no row"),
        ("\tneutral\ta cat\ta dog", r"line 14: 4 columns of 4, and the language '': this is no row"),
        ("zz\tneutral\thalf a r", r"line 14: 3 columns of 4, and the language 'zz'"),
        ("neutral\tneutral\ta cat\ta dog", r"line 14: 4 columns of 4, and the language 'neutral'"),
        ("../x\tneutral\ta cat\ta dog", r"line 14: .* the language '../x'"),
        ("de\tneutral\ta cat", r"line 14: 3 columns where 4 are expected"),
        ("en\tneutral\ta cat\ta dog\t", r"line 14: 5 columns where 4 are expected"),
        ("de\t\ta cat\ta dog", r"line 14: the label is missing"),
    ],
)
def test_what_is_no_row_is_told_or_counted(tmp_path, tokenizer, capsys, line, told):
    root = write_xnli(tmp_path / "data", "release")
    path = root / "XNLI" / "xnli.dev.tsv"
    path.write_text(path.read_text() + line)  # without its end
    given = arguments(root, tokenizer, tmp_path / "out", "--tasks", "xnli")
    if told is not None:
        assert re.search(rf"xnli\.dev\.tsv, {told}", refused(capsys, "glue", given))
        given += ["--on-bad-row", "drop"]
    prepare("glue", given)
    rows = table(capsys.readouterr().out, "XNLI")
    numbers = {split: [int(one) for one in cells[:3]] for split, cells in rows.items()}
    assert numbers.keys() == {"train", "valid", "valid_en", "valid_de", "test_en", "test_de"}
    assert [numbers["valid_en"][0], numbers["valid_de"][0], numbers["train"][0]] == [4, 8, 12]
    dropped, blank = (numbers["valid_en"][n] + numbers["valid_de"][n] for n in (1, 2))
    assert (dropped, blank) == ((0, 3) if told is None else (1, 0))
    counted = dict(one.split(": ") for one in rows["train"][-1].split(", "))
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
    rows = {split: cells[:3] for split, cells in table(capsys.readouterr().out, "XNLI").items()}
    assert rows["valid_en"] == rows["valid"] == ["4", "1", "1"] and rows["valid_de"] == ["1", "0", "0"]


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
    assert f"{path}, line 5: quotes are not as in CSV" in refused(capsys, "glue", given)


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
    assert tuple(part.tolist() for part in stages.shorten(parts, length)) == expected
    assert [part.tolist() for part in stages.shorten(parts, 0)] == [p.tolist() for p in parts]
    assert len(stages.shorten((parts[0],), length)[0]) == min(first, length - 2)


def test_lengths_are_kept(tmp_path, glue, tokenizer):
    out = tmp_path / "out"
    prepare("glue", arguments(glue, tokenizer, out, "--tasks", "RTE", "--max-length", "9"))
    _, dataset = load(out / "RTE", "train", 2)
    assert max(len(item["net_input.src_tokens"]) for item in dataset) == 9


def test_workers_change_nothing(tmp_path, glue, tokenizer, prepared, monkeypatch):
    monkeypatch.setattr(stages, "CHUNK", 5)
    tasks = ("MNLI", "STS-B")  # a task has nine pools of processes
    prepare("glue", arguments(glue, tokenizer, tmp_path / "out", "--tasks", ",".join(tasks), "--workers", "3"))
    for task in tasks:
        assert contents(tmp_path / "out" / task) == contents(prepared / task) != {}


def test_interrupted_run_goes_on(tmp_path, glue, tokenizer, prepared, monkeypatch, capsys):
    original, done = stages.write_task, []

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


@pytest.mark.parametrize(
    ("place", "line", "error"),
    [
        (0, "index\tsentence1\tlabel", "line 1: there is no column 'sentence2'"),
        (3, "0\ta cat\ta dog", "line 4: 3 columns where 4 are expected"),
        (3, "0\ta cat\tx\ty\tentailment", "line 4: 5 columns where 4 are expected"),
        (3, "0\ta cat\ta dog\t", "line 4: the label is missing"),
        (5, "0\ta cat\ta dog\tmaybe", "line 6: the label must be one of"),
        (5, "0\t\ta dog\tentailment", "line 6: the first sentence is empty"),
    ],
)
def test_bad_rows_are_named_or_dropped(tmp_path, glue, tokenizer, capsys, place, line, error):
    folder = shutil.copytree(glue / "RTE", tmp_path / "glue" / "RTE")
    (folder / "test.tsv").unlink()
    lines = (folder / "train.tsv").read_text().splitlines()
    lines[place] = line
    (folder / "train.tsv").write_text("\n".join(lines))
    given = arguments(tmp_path / "glue", tokenizer, tmp_path / "out")
    assert f"train.tsv, {error}" in refused(capsys, "glue", given)
    if place:
        prepare("glue", [*given, "--on-bad-row", "drop"])
        assert table(capsys.readouterr().out, "RTE")["train"][:2] == ["19", "1"]


@pytest.mark.parametrize("score", ["7.0", "-1", "nan", "good"])
def test_scores_are_checked(score):
    with pytest.raises(UserError, match="a number from 0 to 5"):
        glue_tasks._checked_label(score, GLUE["STS-B"])


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--tasks RTE,WNLY", "there is no GLUE task 'WNLY'"),
        ("--max-length 3", "--max-length must be 0 or at least 8"),
        ("--workers 0", "--workers must be >= 1"),
        ("--tasks XNLI", "XNLI: there is no folder"),
        (None, "give --tokenizer-folder and --out"),
    ],
)
def test_wrong_commands_are_one_line(tmp_path, glue, tokenizer, capsys, line, error):
    given = [glue] if line is None else arguments(glue, tokenizer, tmp_path / "out", *line.split())
    assert error in refused(capsys, "glue", given)


def test_a_task_without_its_training_file_is_left_out(tmp_path, glue, tokenizer, capsys):
    """QNLI is handed on without train.tsv in places: the other tasks do not wait for it."""
    for task in ("RTE", "QNLI"):
        shutil.copytree(glue / task, tmp_path / task)
    (tmp_path / "QNLI" / "train.tsv").unlink()
    prepare("glue", arguments(tmp_path, tokenizer, tmp_path / "out"))
    said = capsys.readouterr()
    assert "warning: QNLI is left out: " in said.err and "train.tsv is missing" in said.err
    assert "RTE" in said.out and not (tmp_path / "out" / "QNLI").exists()
    named = arguments(tmp_path, tokenizer, tmp_path / "no", "--tasks", "QNLI,RTE")
    assert "train.tsv is missing" in refused(capsys, "glue", named)


def test_a_missing_file_and_a_foreign_dictionary_are_named(tmp_path, glue, tokenizer, capsys):
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "train.tsv").write_text("x")
    given = arguments(tmp_path, tokenizer, tmp_path / "out", "--tasks", "RTE")
    assert "dev.tsv is missing" in refused(capsys, "glue", given)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tokenizer / "tokenizer.json", other)
    for text, message in (("red 1\n", "lacks"), ("red\n", "line 1: not `SYMBOL COUNT`")):
        (other / "dict.txt").write_text(text)
        assert message in refused(capsys, "glue", arguments(glue, other, tmp_path / "out"))


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
