"""An evaluation uses what the checkpoint was trained with, option by option, or says what it replaced."""

from __future__ import annotations

import argparse
import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY

from helpers import commands as cli
from helpers.commands import QUIET, USER_DIR, call, captured, evaluate, relpos
from helpers.segment_corpus import binarise, train, write_corpus, write_lines
from relpos_fairseq.data.streams.dataset import find_documents
from relpos_fairseq.evaluation.language_model import (
    Dynamic,
    load_subject,
    read_text,
    score_dynamic,
    score_with_memory,
    score_with_windows,
)
from relpos_fairseq.inference.checkpoints.causal_lm import Continuation, Scorer, open_model
from relpos_fairseq.saved.identity import WHERE
from relpos_fairseq.saved.model import PACKAGE, TASKS, SavedModel

# Every option of every task, at the border where fairseq's commands read them

OURS = [name for name, task in TASK_REGISTRY.items() if task.__module__.startswith(PACKAGE)]
PARSERS = {
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "validate": options.get_validation_parser,
    "eval-lm": options.get_eval_lm_parser,
}


def options_of(task: str) -> list[argparse.Action]:
    """The options of a task that change a number."""
    parser = argparse.ArgumentParser(add_help=False)
    TASK_REGISTRY[task].add_args(parser)
    return [action for action in parser._actions if not re.fullmatch(WHERE, action.dest)]


def other(action: argparse.Action) -> object:
    """A value that is not the default, as a training has read it."""
    if action.nargs == 0:
        return not action.default
    if action.choices:
        return next(choice for choice in action.choices if choice != action.default)
    if action.type in (int, float):
        return action.type(3 + (action.default or 0))
    return action.type("[5, 6]") if action.type and action.type is not str else "another"


def checkpoint(path: Path, task: str, values: dict, model: str = "relpos_transformer") -> Path:
    torch.save({"cfg": {"model": {"_name": model}, "task": {"_name": task, **values}}, "model": {}}, path)
    return path


@pytest.mark.parametrize("command", PARSERS)
@pytest.mark.parametrize("task", [*OURS, *(name for name in TASKS if name in TASK_REGISTRY)])
def test_every_option_is_the_checkpoints_or_said_to_be_replaced(task, command, tmp_path):
    actions = options_of(task)
    values = {action.dest: other(action) for action in actions}
    assert values and all(values[action.dest] != action.default for action in actions)
    given = ["DATA", "--user-dir", str(USER_DIR), "--path", str(checkpoint(tmp_path / "a.pt", task, values))]
    given += ["--criterion", task] if task in REGISTRIES["criterion"]["registry"] else []
    with captured() as said:
        found = options.parse_args_and_arch(PARSERS[command](), given)
    assert found.task == task and "in place of" not in said.getvalue()
    assert {name: getattr(found, name) for name in values} == values
    for action in actions:
        if action.nargs == 0 or not isinstance(action.default, (int, float)) or isinstance(action.default, bool):
            continue
        default = [action.option_strings[0], str(action.default)]
        with captured() as said:
            found = options.parse_args_and_arch(PARSERS[command](), [*given, *default])
        assert getattr(found, action.dest) == action.default
        expected = f"{action.dest} {getattr(found, action.dest)} in place of the checkpoint's {values[action.dest]}"
        assert said.getvalue().count(expected) == said.getvalue().count("in place of") == 1


def test_models_of_fairseq_and_flags_of_a_training_are_left_alone(tmp_path):
    values = {"max_source_positions": 7, "truncate_source": True}
    path = checkpoint(tmp_path / "a.pt", "translation", values, "transformer")
    found = options.parse_args_and_arch(options.get_generation_parser(), ["DATA", "--path", str(path)])
    assert (found.max_source_positions, found.truncate_source) == (1024, False)
    (tmp_path / "b.pt").write_text("no checkpoint")
    found = options.parse_args_and_arch(options.get_generation_parser(), ["DATA", "--path", str(tmp_path / "b.pt")])
    assert found.task == "translation"
    for given, said in {
        "b.pt": r"b\.pt \(13 bytes\) is truncated or no checkpoint",
        "a.pt": r"a\.pt is no checkpoint of a model of ours, which names its task: give --task",
        "c.pt": r"--path .*c\.pt does not exist",
        "": "give --path CHECKPOINT",
    }.items():
        where = ["--path", str(tmp_path / given)] if given else []
        with pytest.raises(ValueError, match=said):
            options.parse_args_and_arch(options.get_validation_parser(), ["DATA", *where])


@pytest.mark.parametrize("flag", [["--position-scheme", "rope"], ["--position-scheme=rope"], ["--encoder-layers", "2"]])
def test_a_flag_of_the_model_is_no_flag_of_an_evaluation(flag, tmp_path):
    given = ["DATA", "--user-dir", str(USER_DIR), "--path", str(checkpoint(tmp_path / "a.pt", "translation", {}))]
    parser = options.get_generation_parser()
    parser.add_argument("--arch", default="wav2vec2")  # as fairseq-generate does
    with pytest.raises(ValueError, match=f"{flag[0].split('=')[0]}: the model is that of the checkpoint"):
        options.parse_args_and_arch(parser, [*given, *flag])


@pytest.mark.parametrize("command", PARSERS)
def test_a_criterion_of_another_program_stops_no_evaluation(command, tmp_path):
    """Nor one whose flags a training must give: the command takes them from the checkpoint."""
    for name, taken in (("of_another_program", "cross_entropy"), ("composite_loss", "composite_loss")):
        path = checkpoint(tmp_path / f"{name}.pt", "translation", {})
        torch.save(torch.load(path) | {"cfg": torch.load(path)["cfg"] | {"criterion": {"_name": name}}}, path)
        given = ["DATA", "--user-dir", str(USER_DIR), "--path", str(path)]
        assert options.parse_args_and_arch(PARSERS[command](), given).criterion == taken
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(PARSERS[command](), given[1:])  # without its data


@pytest.mark.parametrize("text", ["[1]", "{'x':", "dropout=0.1"])
def test_model_overrides_are_a_dict(text, tmp_path):
    with pytest.raises(ValueError, match=r"--model-overrides .*: give a dict, such as \"{'dropout': 0.1}\""):
        options.parse_args_and_arch(options.get_generation_parser(), ["DATA", "--model-overrides", text])


def test_model_overrides_replace_an_option_of_the_task(tmp_path):
    path = checkpoint(tmp_path / "a.pt", "segment_language_modeling", {"reset_memory_at_document": True})
    given = ["DATA", "--path", str(path), "--model-overrides", "{'reset_memory_at_document': False}"]
    with captured() as said:
        found = options.parse_args_and_arch(options.get_eval_lm_parser(), given)
    assert not found.reset_memory_at_document
    assert "reset_memory_at_document False in place of the checkpoint's True" in said.getvalue()


# Numbers


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> Path:
    """Characters, some of whose lines are equal; documents are of two lines in the sidecar."""
    raw = tmp_path_factory.mktemp("lines")
    write_lines(raw / "train", 20, 1)
    write_lines(raw / "valid", 6, 2)
    (raw / "valid").write_text((raw / "valid").read_text() * 2)
    data = binarise(raw, raw / "bin")
    for split in ("train", "valid"):
        tokens = np.concatenate([[2], np.fromfile(data / f"{split}.bin", np.uint16)[:-1]])
        np.save(data / f"{split}.documents.npy", np.flatnonzero(tokens == 2)[::2])
    return data


@pytest.fixture(scope="module", params=["eos", "sidecar"])
def apart(request, lines, tmp_path_factory) -> tuple[Path, Path, str]:
    """A model that was trained on documents apart, with memory that holds a whole one in evaluation."""
    folder = tmp_path_factory.mktemp("apart")
    documents = ["--reset-memory-at-document", "--document-boundaries", request.param, "--eval-mem-len", "40"]
    train(lines, folder, "--max-update", "30", "--lr", "2e-2", *documents)
    return folder / "checkpoint_last.pt", lines, request.param


@torch.no_grad()
def documents_alone(model, tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Nats (N - 1,) of every prediction, each document in one pass of its own."""
    found = []
    for start, end in zip(starts, [*starts[1:], len(tokens) - 1], strict=True):
        ids = torch.from_numpy(tokens[start : end + 1].astype(int))[None]
        scores = model(ids[:, :-1])[0].log_softmax(-1)
        found.append(-scores.gather(-1, ids[:, 1:, None]).flatten().numpy())
    return np.concatenate(found)


@pytest.fixture(scope="module")
def exact(apart):
    """(the model in fp64 with its text, nats of each prediction, where documents start)."""
    path, data, kind = apart
    subject = load_subject(path, data, "valid")
    subject = replace(subject, model=subject.model.double())
    starts = find_documents(data / "valid", subject.tokens, kind, 2)
    assert len(starts) == (12 if kind == "eos" else 6) and (np.diff(starts) < 40).all()
    subject.model.mem_len = 40
    return subject, documents_alone(subject.model, subject.tokens, starts), starts


def evaluations(path: Path, data: Path, out: Path) -> dict[str, float]:
    """Bits a token by every command, without a flag."""
    validated = evaluate("validate", data, path, "--batch-size", "1")
    scored = evaluate("eval_lm", data, path, "--gen-subset", "valid")
    assert "in place of" not in validated + scored
    with captured() as said:
        assert relpos("evaluate", "lm", path, "--data", data) == 0
        lengths = ("--mem-len", "40", "--lengths", "200", "--out", out)
        assert relpos("evaluate", "length", path, "--data", data, *lengths) == 0
    assert "in place of" not in said.getvalue()
    with (out / "length.csv").open() as file:
        rows = {(row["kind"], row["length"]): row["bits"] for row in csv.DictReader(file)}
    return {
        "validate": cli.value(validated, "bpc"),
        "eval-lm": float(re.search(r"Loss \(base 2\): ([\d.]+)", scored)[1]),
        "evaluate lm": float(re.search(r"memory 40 .*\| +([\d.]+) \| +[\d,]+ \|", said.getvalue())[1]),
        "evaluate length": float(rows["memory", "40"]),
    }


def test_every_command_scores_documents_apart(apart, exact, tmp_path):
    path, data, _ = apart
    nats = exact[1]
    commands = ("validate", "eval-lm", "evaluate lm", "evaluate length")
    expected = dict.fromkeys(commands, nats.mean() / math.log(2))
    assert evaluations(path, data, tmp_path) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("block", "rows"), [(3, 1), (8, 3), (50, 2)])
def test_equal_documents_have_equal_scores_wherever_they_stand(exact, block, rows):
    subject, nats, starts = exact
    targets = range(1, len(subject.tokens))
    each = score_with_memory(subject, targets, block, 40, rows).each
    assert each == pytest.approx(nats, abs=2e-6)  # fairseq's log_softmax is fp32
    half = len(subject.tokens) // 2
    assert each[: half - 1] == pytest.approx(each[half:], abs=2e-6) and half in starts
    late = score_with_memory(subject, targets[-30:], block, 40, rows).each
    assert late == pytest.approx(nats[-30:], abs=2e-6)


def test_windows_and_learning_models_see_one_document(exact):
    subject, nats, _ = exact
    every = range(1, len(subject.tokens))
    each = score_with_windows(subject, every, len(subject.tokens) - 1, 1, 4).each
    subject.model.mem_len = 40
    assert each == pytest.approx(nats, abs=2e-6)
    still = score_dynamic(subject, every, 8, 40, Dynamic(1e-30, 0.0)).each
    assert still == pytest.approx(nats, abs=2e-6)


def test_requests_and_samples_begin_lines_anew(apart, exact):
    """The scores of a text of several lines, and of its symbols one by one."""
    path, data, kind = apart
    if kind != "eos":
        pytest.skip("a request is one document")
    subject, nats, _ = exact
    trained = open_model(path, data, True)
    trained.model.double()
    ids = [2, *map(int, subject.tokens)]
    for segment in (3, 8, len(ids)):  # a line begins with a segment, and all fit into one
        trained.cfg.task.tokens_per_sample = segment
        [(found, _)] = Scorer(trained).score([(ids, 2)])
        assert found == pytest.approx(-nats.sum(), rel=1e-5)
        start, total = Continuation(trained), 0.0
        scores = start.read(ids[:2])
        for symbol in ids[2:]:
            total += float(scores[0, symbol])
            scores = start.add(torch.tensor([symbol]))
        assert total == pytest.approx(-nats.sum(), rel=1e-5)


def test_documents_that_are_missing_are_named(apart, tmp_path, capsys):
    path, data, kind = apart
    plain = write_corpus(tmp_path)
    for command in (["lm", path, "--data", plain], ["length", path, "--data", plain, "--out", tmp_path / "out"]):
        status = relpos("evaluate", *command)
        error = capsys.readouterr().err
        assert status == (2 if kind == "sidecar" else 0)
        if kind == "sidecar":
            assert "valid.documents.npy (relpos prepare lm writes it), or --document-boundaries eos" in error
            with captured() as said:
                assert relpos("evaluate", *command, "--document-boundaries", "eos") == 0
            assert "document_boundaries eos in place of the checkpoint's sidecar" in said.getvalue()
    with pytest.raises(ValueError, match="was trained without --reset-memory-at-document"):
        train(plain, tmp_path / "plain", "--max-update", "1")
        load_subject(tmp_path / "plain" / "checkpoint_last.pt", plain, "valid", boundaries="eos")
    assert read_text(plain / "valid", load_subject(path, data, "valid").model.decoder.dictionary, None)[1] is None


def test_our_commands_say_what_they_replace(apart):
    """Of the task and of the model alike; where the data lie is no number, and what is the same is not replaced."""
    with captured() as said:
        given = {"data": "moved", "tokens_per_sample": 64, "mem_len": 10, "same_length": True}
        cfg = SavedModel.open(apart[0], given).checkpoint["cfg"]
    found = re.findall(r"(\S+ \S+ in place of .*)$", said.getvalue(), re.MULTILINE)
    places = "in place of the checkpoint's"
    assert sorted(found) == [f"same_length True {places} False", f"tokens_per_sample 64 {places} 8"]
    assert (cfg.task.data, cfg.task.tokens_per_sample, cfg.model.same_length) == ("moved", 64, True)


def test_fairseqs_commands_say_what_they_replace(apart):
    """Each option once, whether a flag or --model-overrides has it."""
    path, data, _ = apart
    given = ["--tokens-per-sample", "9", "--model-overrides", "{'eval_mem_len': 5}"]
    for tool, more in (("validate", ["--batch-size", "1"]), ("eval_lm", ["--gen-subset", "valid"])):
        said = evaluate(tool, data, path, *given, *more)
        found = sorted(re.findall(r"(\S+ \S+ in place of .*)$", said, re.MULTILINE))
        places = "in place of the checkpoint's"
        assert found == [f"eval_mem_len 5 {places} 40", f"tokens_per_sample 9 {places} 8"]


# Other tasks

LM = (
    "--task language_modeling --arch relpos_transformer_lm_tiny --decoder-layers 1 --decoder-attention-heads 2 "
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --optimizer relpos_adam --lr 1e-2 --batch-size 4 "
    "--criterion relpos_cross_entropy --distributed-world-size 1 --no-epoch-checkpoints --disable-validation"
).split() + QUIET


@pytest.mark.parametrize("mode", ["eos", "complete"])
def test_lines_of_a_language_model_are_cut_as_in_training(mode, lines, tmp_path):
    flags = [*f"--sample-break-mode {mode} --tokens-per-sample 30 --max-update 9".split(), *LM]
    call("train", lines, "--user-dir", USER_DIR, "--save-dir", tmp_path, *flags)
    path, rows = tmp_path / "checkpoint_last.pt", ("--batch-size", "4")
    validated = cli.value(evaluate("validate", lines, path, *rows), "loss")
    ways = ([], ["--sample-break-mode", "none"])
    scored = [evaluate("eval_lm", lines, path, *rows, "--gen-subset", "valid", *more) for more in ways]
    bits = [float(re.search(r"Loss \(base 2\): ([\d.]+)", text)[1]) for text in scored]
    assert bits[0] == pytest.approx(validated, abs=1e-3) and abs(bits[1] - bits[0]) > 1e-3
    assert f"sample_break_mode none in place of the checkpoint's {mode}" in scored[1]
    with captured() as said:
        assert relpos("evaluate", "lm", path, "--data", lines) == 0
    assert f"sample_break_mode none in place of the checkpoint's {mode}" in said.getvalue()


def test_sources_are_cut_as_in_training(corpus, briefly):
    path = briefly("--truncate-source", "--max-source-positions", "5", "--left-pad-source")
    validated = cli.value(evaluate("validate", corpus.binary, path, "--batch-size", "8"), "nll_loss")
    of_reference = ("--batch-size", "8", "--gen-subset", "valid", "--score-reference")
    scored = evaluate("generate", corpus.binary, path, *of_reference)
    found = [float(one) for line in re.findall(r"^P-\d+\t(.*)$", scored, re.MULTILINE) for one in line.split()]
    assert -np.mean(found) == pytest.approx(validated, abs=2e-3)
    assert "in place of" not in scored
