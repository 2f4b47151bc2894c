"""Task segment_language_modeling by fairseq's commands: counts, memory, resume, processes."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch

from helpers.commands import USER_DIR, call, forked_training, load, losses, value
from helpers.segment_corpus import (
    QUIET,
    TASK,
    arguments,
    binarise,
    evaluate,
    killed_after,
    train,
    write_corpus,
    write_lines,
)
from relpos_fairseq.tasks.segment_language_modeling import SegmentLanguageModelingTask, check_memory_flags


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A checkpoint after two epochs and a bit."""
    folder = tmp_path_factory.mktemp("trained")
    output = train(corpus, folder, "--max-update", "27")
    return folder / "checkpoint_last.pt", output


def parameters(path) -> dict:
    return load(path)["model"]


def exact_loss(path) -> float:
    """The epoch's mean training loss so far, as a checkpoint keeps it."""
    meters = {key: state for _, key, _, state in load(path)["extra_state"]["metrics"]["train"]}
    return float(meters["loss"]["sum"]) / float(meters["loss"]["count"])


def assert_equal_runs(one, other, updates: int) -> None:
    """Weights, optimizer and memory of two checkpoints are equal, bit by bit."""
    a, b = load(one), load(other)
    assert a["optimizer_history"][-1]["num_updates"] == updates
    assert a["model"].keys() == b["model"].keys()
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    first, second = (state["last_optimizer_state"]["state"] for state in (a, b))
    for number, state in first.items():
        for name, part in state.items():
            assert torch.equal(torch.as_tensor(part), torch.as_tensor(second[number][name])), name
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
def test_evaluation_counts_the_same_tokens_at_every_batch_size(trained, corpus, batch):
    output = evaluate(corpus, trained[0], "--batch-size", batch)
    tokens = int(re.search(r"valid: (\d+) tokens", output).group(1))
    assert value(output, "predicted") == tokens - 1
    assert f"{batch - 1} seam(s)" in output


def test_perplexity_does_not_depend_on_the_block_where_memory_covers_the_stream(trained, corpus):
    found = []
    for block in (3, 8, 50):
        output = call(
            "eval_lm",
            *(corpus, "--user-dir", USER_DIR, "--path", trained[0], "--gen-subset", "valid"),
            *(*TASK[:2], "--tokens-per-sample", block, *QUIET),
            *("--model-overrides", "{'eval_mem_len': 500}"),
        )
        assert "0 seam(s)" in output
        found.append(float(re.search(r"Loss \(base 2\): ([\d.]+)", output).group(1)))
    assert max(found) - min(found) <= 1.01e-4, found
    validated = evaluate(corpus, trained[0], "--batch-size", "1", "--model-overrides", "{'eval_mem_len': 500}")
    assert value(validated, "bpc") == pytest.approx(found[0], abs=1e-4)
    short = evaluate(corpus, trained[0], "--batch-size", "1", "--model-overrides", "{'eval_mem_len': 0}")
    assert value(short, "bpc") != pytest.approx(found[0], abs=1e-3)


def test_validation_leaves_the_memory_of_training_alone(trained, corpus, tmp_path):
    more = ["--max-update", "9", "--keep-interval-updates", "1", "--save-interval-updates", "3"]
    alone = train(corpus, tmp_path / "alone", *more)
    checked = [part for part in arguments(corpus, tmp_path / "checked", *more)]
    checked.remove("--disable-validation")
    watched = call("train", *checked, "--validate-interval-updates", "2", "--batch-size-valid", "3")
    assert losses(watched, "valid") and losses(watched) == losses(alone)
    assert "valid: " in watched and "3 row(s)" in watched
    last = "checkpoint_last.pt"
    assert_equal_runs(tmp_path / "alone" / last, tmp_path / "checked" / last, 9)


@pytest.mark.parametrize("update", [5, 17])
def test_a_resumed_run_equals_one_that_never_stopped(trained, corpus, tmp_path, update):
    """Interrupted in the first epoch and in the second, without --update-epoch-batch-itr."""
    train(corpus, tmp_path, "--max-update", update)
    output = train(corpus, tmp_path, "--max-update", "27")
    assert losses(output) == losses(trained[1])[update:]
    assert_equal_runs(tmp_path / "checkpoint_last.pt", trained[0], 27)


@pytest.mark.parametrize("flag", ["--memory-efficient-bf16", "--memory-efficient-fp16"])
def test_a_resumed_run_without_fp32_copies(corpus, tmp_path, flag):
    for name, updates in (("whole", [12]), ("parts", [7, 12])):
        for stop in updates:
            train(corpus, tmp_path / name, "--max-update", stop, flag)
    last = "checkpoint_last.pt"
    assert_equal_runs(tmp_path / "whole" / last, tmp_path / "parts" / last, 12)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_equal(trained, corpus, tmp_path):
    saving = ("--save-interval-updates", "2", "--keep-interval-updates", "1")
    assert killed_after(17, corpus, tmp_path, "--max-update", "27", *saving) == -9
    output = train(corpus, tmp_path, "--max-update", "27")
    again = losses(output)
    assert 0 < len(again) < 27 and again == losses(trained[1])[-len(again) :]
    assert_equal_runs(tmp_path / "checkpoint_last.pt", trained[0], 27)


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """The checkpoint of three updates."""
    folder = tmp_path_factory.mktemp("stopped")
    train(corpus, folder, "--max-update", "3")
    return folder / "checkpoint_last.pt"


def test_a_resume_with_another_batch_is_one_clear_error(corpus, stopped, tmp_path):
    shutil.copy(stopped, tmp_path)
    with pytest.raises(ValueError, match=r"cannot resume: .*batch size \(2, now 3\).*--reset-data"):
        train(corpus, tmp_path, "--max-update", "5", "--batch-size", "3")
    with pytest.raises(ValueError, match=r"cannot resume: .*tokens per sample \(8, now 9\)"):
        train(corpus, tmp_path, "--max-update", "5", "--tokens-per-sample", "9")
    output = train(corpus, tmp_path, "--max-update", "5", "--batch-size", "3", "--reset-dataloader")
    assert "3 row(s)" in output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mem-len", "9"], r"--mem-len \(10, now 9\)"),
        (["--same-length"], r"--same-length \(False, now True\)"),
        (["--clamp-len", "4"], r"--clamp-len \(0, now 4\)"),
        (
            ["--reset-memory-at-document", "--document-boundaries", "eos"],
            r"--reset-memory-at-document \(False, now True\)",
        ),
    ],
)
@pytest.mark.slow
def test_a_resume_that_remembers_otherwise_is_one_clear_error(corpus, stopped, tmp_path, more, message):
    shutil.copy(stopped, tmp_path)
    with pytest.raises(ValueError, match=f"cannot resume: .*{message}.*--reset-dataloader"):
        train(corpus, tmp_path, "--max-update", "5", *more)
    train(corpus, tmp_path, "--max-update", "5", "--reset-dataloader", *more)


def test_a_resume_may_evaluate_with_another_memory(corpus, stopped, tmp_path):
    shutil.copy(stopped, tmp_path)
    assert len(losses(train(corpus, tmp_path, "--max-update", "5", "--eval-mem-len", "4"))) == 2


def test_a_resume_reads_documents_as_before(corpus, tmp_path):
    starts = ["--reset-memory-at-document", "--document-boundaries"]
    train(corpus, tmp_path, "--max-update", "3", *starts, "eos")
    data = tmp_path / "data"  # the same stream with other documents
    shutil.copytree(corpus, data)
    np.save(data / "train.documents.npy", np.array([0, 20]))
    message = r"cannot resume: .*--document-boundaries \(eos, now sidecar\).*--reset-dataloader"
    with pytest.raises(ValueError, match=message):
        train(data, tmp_path, "--max-update", "5", *starts, "sidecar")
    with pytest.raises(ValueError, match=r"--reset-memory-at-document \(True, now False\)\. Give"):
        train(data, tmp_path, "--max-update", "5")
    again = train(corpus, tmp_path, "--max-update", "5", *starts, "eos", "--clamp-len", "0")
    assert len(losses(again)) == 2


def test_flags_that_an_older_checkpoint_does_not_hold_are_not_compared():
    here = {"mem_len": 10, "clamp_len": 4}
    check_memory_flags(None, here)
    check_memory_flags({"mem_len": 10}, here)
    with pytest.raises(ValueError, match=r"with another --mem-len \(9, now 10\)\. Give"):
        check_memory_flags({"mem_len": 9}, here)


def test_the_memory_of_validation_ends_with_the_split(corpus, tmp_path, monkeypatch):
    """Training goes on without it, and a second validation starts anew."""
    tasks, setup = [], SegmentLanguageModelingTask.setup_task
    monkeypatch.setattr(
        SegmentLanguageModelingTask, "setup_task", lambda *args, **more: tasks.append(setup(*args, **more)) or tasks[-1]
    )
    flags = arguments(corpus, tmp_path, "--max-update", "4", "--no-save")
    flags.remove("--disable-validation")
    output = call("train", *flags, "--validate-interval-updates", "2")
    assert len(losses(output, "valid")) == 2
    assert list(tasks[-1].memories) == [("train", "train")]


def test_a_task_without_memory_is_said(corpus, tmp_path):
    more = ["--task", "language_modeling", "--max-update", "1", "--no-save"]
    assert "carries no memory" in train(corpus, tmp_path, *more)
    assert "carries no memory" not in train(corpus, tmp_path, "--max-update", "1", "--no-save")


def test_updates_of_several_blocks(corpus, tmp_path):
    whole = train(corpus, tmp_path / "whole", "--max-update", "6", "--update-freq", "2")
    train(corpus, tmp_path / "parts", "--max-update", "4", "--update-freq", "2")
    rest = train(corpus, tmp_path / "parts", "--max-update", "6", "--update-freq", "2")
    assert losses(rest) == losses(whole)[4:]


def test_shards_are_read_one_an_epoch(corpus, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    write_lines(raw / "train", 9, 5)
    write_lines(raw / "valid", 3, 6)
    other = binarise(raw, tmp_path / "bin", "--srcdict", corpus / "dict.txt")
    both = f"{corpus}:{other}"
    whole = train(both, tmp_path / "whole", "--max-epoch", "3")
    sizes = re.findall(r"train: (\d+) tokens", whole)
    assert sizes[0] == sizes[2] != sizes[1]
    parts = tmp_path / "parts"
    stop = len(losses(whole)) - 16  # in the second shard
    train(both, parts, "--max-update", stop)
    rest = train(both, parts, "--max-epoch", "3")
    assert losses(rest) == losses(whole)[stop:]


def test_adaptive_softmax(corpus, tmp_path):
    output = train(
        *(corpus, tmp_path, "--max-update", "3", "--criterion", "adaptive_loss"), *("--adaptive-softmax-cutoff", "6")
    )
    assert len(losses(output)) == 3 and value(output, "predicted") > 0


def test_adaptive_softmax_has_its_own_criterion(corpus, tmp_path):
    flags = ["--adaptive-softmax-cutoff", "6", "--max-update", "2", "--no-save"]
    with pytest.raises(ValueError, match=r"here \[6, \d+\].*--criterion adaptive_loss"):
        train(corpus, tmp_path, *flags)


@pytest.mark.slow
def test_a_model_without_memory(corpus, tmp_path, monkeypatch):
    model = ["--arch", "transformer_lm", "--decoder-layers", "1", "--decoder-attention-heads", "2"]
    sizes = [f"--decoder-{name}-dim" for name in ("embed", "input", "output", "ffn-embed")]
    output = call(
        "train",
        *(corpus, "--user-dir", USER_DIR, "--save-dir", tmp_path / "save", *model),
        *[part for name in sizes for part in (name, "16")],
        *("--task", "segment_language_modeling", "--tokens-per-sample", "8", "--batch-size", "2"),
        *("--optimizer", "adam", "--lr", "1e-3", "--criterion", "cross_entropy"),
        *("--max-update", "3", "--log-interval", "1", "--distributed-world-size", "1", *QUIET),
        *("--no-epoch-checkpoints", "--disable-validation"),
    )
    assert len(losses(output)) == 3
    score = [corpus, "--user-dir", USER_DIR, "--path", tmp_path / "save" / "checkpoint_last.pt"]
    score += ["--gen-subset", "valid", *TASK, *QUIET]
    assert "Perplexity" in call("eval_lm", *score)
    needs = "--reset-memory-at-document needs a model with memory .* TransformerLanguageModel has none"
    with pytest.raises(ValueError, match=needs):
        call("eval_lm", *score, "--reset-memory-at-document", "--document-boundaries", "eos")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=needs):
        patch.setattr(SegmentLanguageModelingTask, "load_dataset", None)  # before data is read
        call(
            "train",
            *(corpus, "--user-dir", USER_DIR, "--save-dir", tmp_path, *model, *QUIET, "--no-save"),
            *("--task", "segment_language_modeling", "--tokens-per-sample", "8"),
            *("--reset-memory-at-document", "--document-boundaries", "eos", "--batch-size", "2"),
            *("--criterion", "cross_entropy", "--optimizer", "adam", "--distributed-world-size"),
            "1",
        )
    with pytest.raises(ValueError, match="tokens_per_sample 8 is more than the 4 positions"):
        call(
            "train",
            *(corpus, "--user-dir", USER_DIR, "--save-dir", tmp_path, *model, *QUIET),
            *("--task", "segment_language_modeling", "--tokens-per-sample", "8"),
            *("--max-target-positions", "4", "--batch-size", "2", "--optimizer", "adam"),
            *("--criterion", "cross_entropy", "--distributed-world-size", "1"),
        )


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
    ("more", "message"),
    [
        (["--tokens-per-sample", "0"], "tokens_per_sample must be >= 1, got 0"),
        (["--tokens-per-sample", "9999"], "train: tokens_per_sample 9999 is longer than the data"),
        (["--add-bos-token"], "--add-bos-token: a stream has no sentence starts"),
        (["--skip-remainder-batch"], "--skip-remainder-batch would leave the end of every row"),
        (["--max-tokens", "5"], "--max-tokens 5 is less than one block of 8 tokens"),
        (["--train-subset", "absent"], "no split .*absent"),
        (["--reset-memory-at-document"], "--reset-memory-at-document needs .*documents.npy"),
    ],
)
def test_bad_flags(corpus, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        train(corpus, tmp_path, *more)


def test_bad_data(corpus, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train").write_text("")
    (raw / "valid").write_text("a b z\n")
    other = binarise(raw, tmp_path / "bin", "--srcdict", corpus / "dict.txt")
    with pytest.raises(ValueError, match=r"train (is empty|has \d tokens)"):
        train(other, tmp_path / "save")
    with pytest.raises(ValueError, match="1 of 4 characters are outside the dictionary"):
        train(other, tmp_path / "save", "--train-subset", "valid")
    with pytest.raises(ValueError, match="has no dict.txt"):
        train(raw, tmp_path / "save")
    strange = binarise(raw, tmp_path / "strange")
    with pytest.raises(ValueError, match="has another dict.txt"):
        train(f"{corpus}:{strange}", tmp_path / "save")


@pytest.mark.slow
def test_documents_hide_what_stands_before(trained, corpus):
    """With a boundary after every line, evaluation differs from that of one document."""
    plain = evaluate(corpus, trained[0], "--batch-size", "2")
    flags = ["--reset-memory-at-document", "--document-boundaries", "eos"]
    lines = evaluate(corpus, trained[0], "--batch-size", "2", *flags)
    assert "12 documents" in lines
    assert value(lines, "predicted") == value(plain, "predicted")
    assert value(lines, "bpc") != value(plain, "bpc")


def test_interactive_continues_a_text(trained, corpus, tmp_path):
    (tmp_path / "prompts").write_text("a b c\nd e f _ a b\n")
    output = call(
        "interactive",
        *(corpus, "--user-dir", USER_DIR, "--path", trained[0], *TASK, *QUIET),
        *("--beam", "2", "--max-len-b", "12", "--input", tmp_path / "prompts"),
    )
    found = re.findall(r"^H-\d+\t\S+\t(.*)$", output, re.MULTILINE)
    assert len(found) == 2
    assert found[0].startswith("a b c") and found[1].startswith("d e f _ a b")


def of_two(corpus, save_dir, *more: str) -> list[str]:
    """Command line of one of two processes, with fairseq's default backend."""
    return arguments(corpus, save_dir, "--batch-size", "1", *more)


@pytest.mark.slow
def test_two_processes(corpus, tmp_path):
    """Two with batch 1 equal one with batch 2; a resume of two is bit-equal; of one an error."""
    still = ["--dropout", "0", "--activation-dropout", "0"]  # and Adam would magnify rounding
    still += ["--optimizer", "sgd", "--lr", "0.3", "--max-update", "12"]
    one = train(corpus, tmp_path / "one", *still)
    two = forked_training(of_two(corpus, tmp_path / "two", *still), 2, tmp_path / "log")
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)  # printed to three digits
    single, double = (tmp_path / name / "checkpoint_last.pt" for name in ("one", "two"))
    assert exact_loss(double) == pytest.approx(exact_loss(single), abs=1e-5)
    for name, tensor in parameters(single).items():
        torch.testing.assert_close(parameters(double)[name], tensor, atol=1e-5, rtol=1e-4)
    forked_training(of_two(corpus, tmp_path / "parts", *still[:-1], "7"), 2, tmp_path / "log")
    rest = forked_training(of_two(corpus, tmp_path / "parts", *still), 2, tmp_path / "log")
    assert losses(rest) == losses(two)[7:]
    last = "checkpoint_last.pt"
    assert_equal_runs(tmp_path / "parts" / last, tmp_path / "two" / last, 12)
    with pytest.raises(ValueError, match=r"batch size \(1, now 2\), processes \(2, now 1\)"):
        train(corpus, tmp_path / "two", *still[:-1], "15")
