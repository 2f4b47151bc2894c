"""Task segment_language_modeling by fairseq's commands: counts, memory, resume, processes."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch

from helpers import commands as cli
from helpers.commands import USER_DIR, call, forked_training, load, losses, value
from helpers.segment_corpus import QUIET, TASK, arguments, binarise, evaluate, killed_after, train, write_lines
from helpers.shell import told
from relpos_fairseq.tasks.segment_language_modeling import SegmentLanguageModelingTask, check_memory_flags


@pytest.fixture(scope="module")
def trained(stream, tmp_path_factory):
    """A checkpoint after two epochs and a bit."""
    folder = tmp_path_factory.mktemp("trained")
    output = train(stream, folder, "--max-update", "27")
    return folder / "checkpoint_last.pt", output


def exact_loss(path) -> float:
    """The epoch's mean training loss so far, as a checkpoint keeps it."""
    meters = {key: state for _, key, _, state in load(path)["extra_state"]["metrics"]["train"]}
    return float(meters["loss"]["sum"]) / float(meters["loss"]["count"])


def assert_equal_runs(one, other, updates: int) -> None:
    """Weights, optimizer and memory of two checkpoints are equal, bit by bit."""
    cli.assert_same_state(one, other)
    a, b = load(one), load(other)
    assert a["optimizer_history"][-1]["num_updates"] == updates
    ranks = [state["extra_state"]["SegmentLanguageModelingTask"]["ranks"] for state in (a, b)]
    for mine, theirs in zip(*ranks, strict=True):
        assert mine["train"]["next_step"] == theirs["train"]["next_step"] > 0
        for name, tensor in mine["train"]["memory"].items():
            assert torch.equal(tensor, theirs["train"]["memory"][name]), name


def test_a_run_learns_and_says_how_it_reads(trained):
    _, output = trained
    found = losses(output)
    assert len(found) == 27 and found[-1] < found[0]
    assert re.search(r"train: 2\d\d tokens, 2\d\d predicted, in 2 row\(s\) x 1 .* 1 seam", output)
    assert "bpc" in output


@pytest.mark.parametrize("batch", [1, 2, 4, 7])
def test_evaluation_counts_the_same_tokens_at_every_batch_size(trained, stream, batch):
    output = evaluate(stream, trained[0], "--batch-size", batch)
    tokens = int(re.search(r"valid: (\d+) tokens", output).group(1))
    assert value(output, "predicted") == tokens - 1
    assert f"{batch - 1} seam(s)" in output


def test_perplexity_does_not_depend_on_the_block_where_memory_covers_the_stream(trained, stream):
    found = []
    for block in (3, 8, 50):
        whole = ("--gen-subset", "valid", *TASK[:2], "--model-overrides", "{'eval_mem_len': 500}")
        output = cli.evaluate("eval_lm", stream, trained[0], *whole, "--tokens-per-sample", block)
        assert "0 seam(s)" in output
        found.append(float(re.search(r"Loss \(base 2\): ([\d.]+)", output).group(1)))
    assert max(found) - min(found) <= 1.01e-4, found
    validated = evaluate(stream, trained[0], "--batch-size", "1", "--model-overrides", "{'eval_mem_len': 500}")
    assert value(validated, "bpc") == pytest.approx(found[0], abs=1e-4)
    short = evaluate(stream, trained[0], "--batch-size", "1", "--model-overrides", "{'eval_mem_len': 0}")
    assert value(short, "bpc") != pytest.approx(found[0], abs=1e-3)


def test_validation_leaves_the_memory_of_training_alone(trained, stream, tmp_path):
    more = ["--max-update", "9", "--keep-interval-updates", "1", "--save-interval-updates", "3"]
    alone = train(stream, tmp_path / "alone", *more)
    checked = arguments(stream, tmp_path / "checked", *more)
    checked.remove("--disable-validation")
    watched = call("train", *checked, "--validate-interval-updates", "2", "--batch-size-valid", "3")
    assert losses(watched, "valid") and losses(watched) == losses(alone)
    assert "valid: " in watched and "3 row(s)" in watched
    last = "checkpoint_last.pt"
    assert_equal_runs(tmp_path / "alone" / last, tmp_path / "checked" / last, 9)


@pytest.mark.parametrize("update", [5, 17])
def test_a_resumed_run_equals_one_that_never_stopped(trained, stream, tmp_path, update):
    """Interrupted in the first epoch and in the second, without --update-epoch-batch-itr."""
    train(stream, tmp_path, "--max-update", update)
    output = train(stream, tmp_path, "--max-update", "27")
    assert losses(output) == losses(trained[1])[update:]
    assert_equal_runs(tmp_path / "checkpoint_last.pt", trained[0], 27)


@pytest.mark.parametrize("flag", ["--memory-efficient-bf16", "--memory-efficient-fp16"])
def test_a_resumed_run_without_fp32_copies(stream, tmp_path, flag):
    for name, updates in (("whole", [12]), ("parts", [7, 12])):
        for stop in updates:
            train(stream, tmp_path / name, "--max-update", stop, flag)
    last = "checkpoint_last.pt"
    assert_equal_runs(tmp_path / "whole" / last, tmp_path / "parts" / last, 12)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_run_resumes_bit_equal(trained, stream, tmp_path):
    saving = ("--save-interval-updates", "2", "--keep-interval-updates", "1")
    assert killed_after(17, stream, tmp_path, "--max-update", "27", *saving) == -9
    output = train(stream, tmp_path, "--max-update", "27")
    again = losses(output)
    assert 0 < len(again) < 27 and again == losses(trained[1])[-len(again) :]
    assert_equal_runs(tmp_path / "checkpoint_last.pt", trained[0], 27)


@pytest.fixture(scope="module")
def stopped(stream, tmp_path_factory):
    """The checkpoint of three updates."""
    folder = tmp_path_factory.mktemp("stopped")
    train(stream, folder, "--max-update", "3")
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize(
    ("more", "changed"),
    {
        "--batch-size 3": "batch size (2, now 3)",
        "--tokens-per-sample 9": "tokens per sample (8, now 9)",
        "--mem-len 9": "--mem-len (10, now 9)",
        "--same-length": "--same-length (False, now True)",
        "--clamp-len 4": "--clamp-len (0, now 4)",
        "--reset-memory-at-document --document-boundaries eos": "--reset-memory-at-document (False, now True)",
    }.items(),
)
@pytest.mark.slow
def test_a_resume_that_reads_or_remembers_otherwise_is_one_clear_error(stream, stopped, tmp_path, more, changed):
    shutil.copy(stopped, tmp_path)
    given = ("--max-update", "5", *more.split())
    with pytest.raises(ValueError, match=told(f"cannot resume: ...{changed}...--reset-dataloader")):
        train(stream, tmp_path, *given)
    said = train(stream, tmp_path, *given, "--reset-dataloader")
    assert ("3 row(s)" in said) == (more == "--batch-size 3")


def test_a_resume_may_evaluate_with_another_memory(stream, stopped, tmp_path):
    shutil.copy(stopped, tmp_path)
    assert len(losses(train(stream, tmp_path, "--max-update", "5", "--eval-mem-len", "4"))) == 2


def test_a_resume_reads_documents_as_before(stream, tmp_path):
    starts = ["--reset-memory-at-document", "--document-boundaries"]
    train(stream, tmp_path, "--max-update", "3", *starts, "eos")
    data = tmp_path / "data"  # the same stream with other documents
    shutil.copytree(stream, data)
    np.save(data / "train.documents.npy", np.array([0, 20]))
    message = r"cannot resume: .*--document-boundaries \(eos, now sidecar\).*--reset-dataloader"
    with pytest.raises(ValueError, match=message):
        train(data, tmp_path, "--max-update", "5", *starts, "sidecar")
    with pytest.raises(ValueError, match=r"--reset-memory-at-document \(True, now False\)\. Give"):
        train(data, tmp_path, "--max-update", "5")
    again = train(stream, tmp_path, "--max-update", "5", *starts, "eos", "--clamp-len", "0")
    assert len(losses(again)) == 2


def test_flags_that_an_older_checkpoint_does_not_hold_are_not_compared():
    here = {"mem_len": 10, "clamp_len": 4}
    check_memory_flags(None, here)
    check_memory_flags({"mem_len": 10}, here)
    with pytest.raises(ValueError, match=r"with another --mem-len \(9, now 10\)\. Give"):
        check_memory_flags({"mem_len": 9}, here)


def test_the_memory_of_validation_ends_with_the_split(stream, tmp_path, monkeypatch):
    """Training goes on without it, and a second validation starts anew."""
    tasks, setup = [], SegmentLanguageModelingTask.setup_task
    monkeypatch.setattr(
        SegmentLanguageModelingTask, "setup_task", lambda *args, **more: tasks.append(setup(*args, **more)) or tasks[-1]
    )
    flags = arguments(stream, tmp_path, "--max-update", "4", "--no-save")
    flags.remove("--disable-validation")
    output = call("train", *flags, "--validate-interval-updates", "2")
    assert len(losses(output, "valid")) == 2
    assert list(tasks[-1].memories) == [("train", "train")]


def test_a_task_without_memory_is_said(stream, tmp_path):
    more = ["--task", "language_modeling", "--max-update", "1", "--no-save"]
    assert "carries no memory" in train(stream, tmp_path, *more)
    assert "carries no memory" not in train(stream, tmp_path, "--max-update", "1", "--no-save")


def test_updates_of_several_blocks(stream, tmp_path):
    whole = train(stream, tmp_path / "whole", "--max-update", "6", "--update-freq", "2")
    train(stream, tmp_path / "parts", "--max-update", "4", "--update-freq", "2")
    rest = train(stream, tmp_path / "parts", "--max-update", "6", "--update-freq", "2")
    assert losses(rest) == losses(whole)[4:]


def test_shards_are_read_one_an_epoch(stream, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    write_lines(raw / "train", 9, 5)
    write_lines(raw / "valid", 3, 6)
    other = binarise(raw, tmp_path / "bin", "--srcdict", stream / "dict.txt")
    both = f"{stream}:{other}"
    whole = train(both, tmp_path / "whole", "--max-epoch", "3")
    sizes = re.findall(r"train: (\d+) tokens", whole)
    assert sizes[0] == sizes[2] != sizes[1]
    parts = tmp_path / "parts"
    stop = len(losses(whole)) - 16  # in the second shard
    train(both, parts, "--max-update", stop)
    rest = train(both, parts, "--max-epoch", "3")
    assert losses(rest) == losses(whole)[stop:]


def test_adaptive_softmax(stream, tmp_path):
    more = "--max-update 3 --criterion adaptive_loss --adaptive-softmax-cutoff 6"
    output = train(stream, tmp_path, *more.split())
    assert len(losses(output)) == 3 and value(output, "predicted") > 0


@pytest.mark.slow
def test_a_model_without_memory(stream, tmp_path, monkeypatch):
    model = "--arch transformer_lm --decoder-layers 1 --decoder-attention-heads 2 --decoder-embed-dim 16"
    model += " --decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 16 --batch-size 2"
    loss = "--criterion cross_entropy --optimizer adam --lr 1e-3 --distributed-world-size 1 --log-interval 1"
    where = (stream, "--user-dir", USER_DIR, "--save-dir", tmp_path / "save", *TASK, *QUIET)
    given = ["train", *where, *f"{model} {loss} --max-update 3 --no-epoch-checkpoints --disable-validation".split()]
    assert len(losses(call(*given))) == 3
    score = ("eval_lm", stream, tmp_path / "save" / "checkpoint_last.pt", "--gen-subset", "valid", *TASK)
    assert "Perplexity" in cli.evaluate(*score)
    apart = ("--reset-memory-at-document", "--document-boundaries", "eos")
    needs = "--reset-memory-at-document needs a model with memory .* TransformerLanguageModel has none"
    with pytest.raises(ValueError, match=needs):
        cli.evaluate(*score, *apart)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=needs):
        patch.setattr(SegmentLanguageModelingTask, "load_dataset", None)  # before data is read
        call(*given, *apart, "--no-save", "--save-dir", tmp_path)
    with pytest.raises(ValueError, match="tokens_per_sample 8 is more than the 4 positions"):
        call(*given, "--max-target-positions", "4", "--save-dir", tmp_path)


def test_words_and_subwords(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, count in (("train", 20), ("valid", 9)):
        text = raw / name
        write_lines(text, count, count, words=True)
        pieces = [w[0] + "@@ " + w[1:] for w in text.read_text().split(" ") if len(w) > 1]
        text.write_text(" ".join(pieces))
    data = binarise(raw, tmp_path / "bin")
    subword = train(data, tmp_path / "a", "--max-update", "2", "--no-save")
    assert value(subword, "word_ppl") > value(subword, "ppl")
    word = train(data, tmp_path / "b", "--max-update", "2", "--no-save", "--text-level", "word")
    assert "word_ppl" not in word and "bpc" not in word


@pytest.mark.parametrize(
    ("more", "said"),
    {
        "--tokens-per-sample 0": "tokens_per_sample must be >= 1, got 0",
        "--tokens-per-sample 9999": "train: tokens_per_sample 9999 is longer than the data",
        "--add-bos-token": "--add-bos-token: a stream has no sentence starts",
        "--skip-remainder-batch": "--skip-remainder-batch would leave the end of every row",
        "--max-tokens 5": "--max-tokens 5 is less than one block of 8 tokens",
        "--train-subset absent": "no split ...absent",
        "--reset-memory-at-document": "--reset-memory-at-document needs ...documents.npy",
        "--adaptive-softmax-cutoff 6 --no-save": "here [6, ...--criterion adaptive_loss",
    }.items(),
)
def test_bad_flags(stream, tmp_path, more, said):
    with pytest.raises(ValueError, match=told(said)):
        train(stream, tmp_path, *more.split())


def test_bad_data(stream, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train").write_text("")
    (raw / "valid").write_text("a b z\n")
    other = binarise(raw, tmp_path / "bin", "--srcdict", stream / "dict.txt")
    with pytest.raises(ValueError, match=r"train (is empty|has \d tokens)"):
        train(other, tmp_path / "save")
    with pytest.raises(ValueError, match="1 of 4 characters are outside the dictionary"):
        train(other, tmp_path / "save", "--train-subset", "valid")
    with pytest.raises(ValueError, match="has no dict.txt"):
        train(raw, tmp_path / "save")
    strange = binarise(raw, tmp_path / "strange")
    with pytest.raises(ValueError, match="has another dict.txt"):
        train(f"{stream}:{strange}", tmp_path / "save")


@pytest.mark.slow
def test_documents_hide_what_stands_before(trained, stream):
    """With a boundary after every line, evaluation differs from that of one document."""
    plain = evaluate(stream, trained[0], "--batch-size", "2")
    flags = ["--reset-memory-at-document", "--document-boundaries", "eos"]
    lines = evaluate(stream, trained[0], "--batch-size", "2", *flags)
    assert "12 documents" in lines
    assert value(lines, "predicted") == value(plain, "predicted")
    assert value(lines, "bpc") != value(plain, "bpc")


def test_interactive_continues_a_text(trained, stream, tmp_path):
    (tmp_path / "prompts").write_text("a b c\nd e f _ a b\n")
    search = ("--beam", "2", "--max-len-b", "12", "--input", tmp_path / "prompts")
    output = cli.evaluate("interactive", stream, trained[0], *TASK, *search)
    found = re.findall(r"^H-\d+\t\S+\t(.*)$", output, re.MULTILINE)
    assert len(found) == 2
    assert found[0].startswith("a b c") and found[1].startswith("d e f _ a b")


def of_two(stream, save_dir, *more: str) -> list[str]:
    """Command line of one of two processes, with fairseq's default backend."""
    return arguments(stream, save_dir, "--batch-size", "1", *more)


@pytest.mark.slow
def test_two_processes(stream, tmp_path):
    """Two with batch 1 equal one with batch 2; a resume of two is bit-equal; of one an error."""
    still = ["--dropout", "0", "--activation-dropout", "0"]  # and Adam would magnify rounding
    still += ["--optimizer", "sgd", "--momentum", "0.5", "--lr", "0.3", "--max-update", "12"]
    one = train(stream, tmp_path / "one", *still)
    two = forked_training(of_two(stream, tmp_path / "two", *still), 2, tmp_path / "log")
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)  # printed to three digits
    single, double = (tmp_path / name / "checkpoint_last.pt" for name in ("one", "two"))
    assert exact_loss(double) == pytest.approx(exact_loss(single), abs=1e-5)
    torch.testing.assert_close(load(double)["model"], load(single)["model"], atol=1e-5, rtol=1e-4)
    forked_training(of_two(stream, tmp_path / "parts", *still[:-1], "7"), 2, tmp_path / "log")
    rest = forked_training(of_two(stream, tmp_path / "parts", *still), 2, tmp_path / "log")
    assert losses(rest) == losses(two)[7:]
    last = "checkpoint_last.pt"
    assert_equal_runs(tmp_path / "parts" / last, tmp_path / "two" / last, 12)
    with pytest.raises(ValueError, match=r"batch size \(1, now 2\), processes \(2, now 1\)"):
        train(stream, tmp_path / "two", *still[:-1], "15")
