"""Streams: every token after the first is predicted exactly once, however the stream is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_fairseq.data.streams.dataset import (
    StreamBatchIterator,
    StreamDataset,
    StreamPlan,
    check_document_starts,
    find_documents,
)
from relpos_fairseq.modules.memory import Memory, StreamMemory
from relpos_fairseq.tasks.segment_language_modeling import log_units
from relpos_fairseq.text.levels import refuse_unknown_characters, text_level, word_ends

PAD = 1
CHEAP = settings(max_examples=40, deadline=None)


def stream(length: int) -> np.ndarray:
    """Tokens that say where they stand: token t is t + 10."""
    return np.arange(length) + 10


def dataset(length: int, block: int, **more) -> StreamDataset:
    return StreamDataset("train", stream(length), PAD, block, **more)


def read_all(data: StreamDataset, batch: int, processes: int, workers: int = 0) -> list[list[dict]]:
    """What each process reads, by fairseq's own iterator."""
    blocks = data.blocks(batch, processes)
    return [
        list(StreamBatchIterator(blocks, rank, num_workers=workers).next_epoch_itr(shuffle=True))
        for rank in range(processes)
    ]


@CHEAP
@given(length=st.integers(2, 200), batch=st.integers(1, 7), processes=st.integers(1, 3), data=st.data())
def test_every_token_after_the_first_is_predicted_once(length, batch, processes, data):
    block = data.draw(st.integers(1, min(length - 1, 40)))
    by_rank = read_all(dataset(length, block), batch, processes)
    assert len({len(samples) for samples in by_rank}) == 1, "ranks have unequal steps"
    predicted = []
    for rank, samples in enumerate(by_rank):
        last = [None] * batch
        for step, sample in enumerate(samples):
            inputs, target = sample["net_input"]["src_tokens"], sample["target"]
            lengths = sample["net_input"]["src_lengths"]
            assert sample["step"] == step
            assert sample["ntokens"] == int(target.ne(PAD).sum()) == int(lengths.sum())
            assert sample["id"].tolist() == list(range(rank * batch, rank * batch + batch))
            for row in range(batch):
                real = int(lengths[row])
                assert (target[row, :real] == inputs[row, :real] + 1).all()
                assert (inputs[row, real:] == PAD).all() and (target[row, real:] == PAD).all()
                if real and last[row] is not None:  # a row goes on where it stopped
                    assert inputs[row, 0] == last[row]
                if real:
                    last[row] = target[row, real - 1]
                predicted += target[row, :real].tolist()
    assert sorted(predicted) == stream(length)[1:].tolist()


@CHEAP
@given(length=st.integers(2, 120), batch=st.integers(1, 4), processes=st.integers(2, 3), data=st.data())
def test_processes_share_what_one_would_read(length, batch, processes, data):
    block = data.draw(st.integers(1, min(length - 1, 30)))
    split = read_all(dataset(length, block), batch, processes)
    (whole,) = read_all(dataset(length, block), batch * processes, 1)
    for step, sample in enumerate(whole):
        together = torch.cat([samples[step]["target"] for samples in split])
        assert torch.equal(together, sample["target"])


@CHEAP
@given(length=st.integers(2, 300), rows=st.integers(1, 20))
def test_seams_lose_context_only(length, rows):
    plan = StreamPlan(length, rows, 1)
    lengths = [plan.row_length(row) for row in range(rows)]
    assert sum(lengths) == length - 1 and max(lengths) - min(lengths) <= 1
    starts = [plan.row_start(row) for row in range(rows)]
    assert starts == np.cumsum([0, *lengths[:-1]]).tolist()
    assert plan.seams == sum(bool(count) for count in lengths) - 1


@pytest.mark.slow
def test_workers_change_nothing():
    alone, helped = (sum(read_all(dataset(99, 7), 2, 2, workers), []) for workers in (0, 2))
    assert all(torch.equal(a["target"], b["target"]) for a, b in zip(alone, helped, strict=True))


@CHEAP
@given(
    length=st.integers(2, 80), batch=st.integers(1, 4), starts=st.sets(st.integers(0, 79), max_size=9), data=st.data()
)
@pytest.mark.slow
def test_documents_start_where_they_start(length, batch, starts, data):
    block = data.draw(st.integers(1, length - 1))
    starts = np.array(sorted(start for start in starts if start < length), dtype=np.int64)
    (samples,) = read_all(dataset(length, block, document_starts=starts), batch, 1)
    seen = set()
    for sample in samples:
        inputs, marks = sample["net_input"]["src_tokens"], sample["net_input"]["document_starts"]
        assert not marks[inputs == PAD].any()
        assert marks[inputs != PAD].tolist() == [token - 10 in starts for token in inputs[inputs != PAD].tolist()]
        seen |= {token - 10 for token in inputs[marks].tolist()}
    assert seen == {start for start in starts.tolist() if start < length - 1}


def test_documents_from_a_sidecar_or_line_ends(tmp_path):
    tokens, train = np.array([5, 6, 2, 7, 2, 8]), tmp_path / "train"
    assert find_documents(train, tokens, "eos", 2).tolist() == [0, 3, 5]
    with pytest.raises(ValueError, match=r"train.documents.npy .*--document-boundaries eos"):
        find_documents(train, tokens, "sidecar", 2)
    np.save(tmp_path / "train.documents.npy", np.array([0, 3], dtype=np.int64))
    assert find_documents(train, tokens, "sidecar", 2).tolist() == [0, 3]
    (tmp_path / "train1.bin").touch()
    assert find_documents(train, tokens, "sidecar", 2).tolist() == [0, 3]
    with pytest.raises(ValueError, match=r"knows nothing of .*train1.bin, which is read as well"):
        find_documents(train, tokens, "sidecar", 2, combine=True)
    for wrong in ([0, 9], [3, 3], [0.5]):
        with pytest.raises(ValueError, match="positions"):
            check_document_starts(np.array(wrong), 6, "x.npy")


@pytest.mark.parametrize(
    ("tokens", "rows", "block", "message"),
    [
        (100, 2, 0, "tokens_per_sample must be >= 1, got 0"),
        (100, 0, 4, "batch size must be >= 1, got 0 rows"),
        (1, 1, 1, "needs two tokens or more.*it has 1"),
        (20, 1, 20, "tokens_per_sample 20 is longer than the data, which has 19 tokens"),
    ],
)
def test_impossible_cuts(tokens, rows, block, message):
    with pytest.raises(ValueError, match=message):
        StreamPlan(tokens, rows, block)
    with pytest.raises(ValueError, match=f"^train: .*{message}"):
        dataset(tokens, block).blocks(rows)


def test_a_position_fits_its_own_cut_only():
    saved = StreamBatchIterator(dataset(99, 7).blocks(2), 0)
    steps = saved.next_epoch_itr()
    next(steps), next(steps)
    state = saved.state_dict()
    again = StreamBatchIterator(dataset(99, 7).blocks(2), 0)
    again.load_state_dict(state)
    assert next(again.next_epoch_itr())["step"] == 2
    others = {
        r"batch size \(2, now 3\)": dataset(99, 7).blocks(3),
        r"batch size \(2, now 1\), processes \(1, now 2\)": dataset(99, 7).blocks(1, 2),
        r"tokens per sample \(7, now 9\)": dataset(99, 9).blocks(2),
        r"tokens of the stream \(99, now 98\)": dataset(98, 7).blocks(2),
    }
    for message, blocks in others.items():
        with pytest.raises(ValueError, match=f"cannot resume.*{message}.*--reset-dataloader"):
            StreamBatchIterator(blocks, 0).load_state_dict(state)
    foreign = {name: value for name, value in state.items() if name != "streams"}
    with pytest.raises(ValueError, match="not written by segment_language_modeling"):
        StreamBatchIterator(dataset(99, 7).blocks(2), 0).load_state_dict(foreign)


def memory_of(value: float) -> Memory:
    return Memory((torch.full((3, 2, 4), value),), torch.ones(2, 3, dtype=torch.bool))


class Reading:
    """Blocks of a stream on a CPU, each of which writes what it is given and tells what the memory was."""

    def __init__(self) -> None:
        self.stream = StreamMemory()

    def __call__(self, step: int, update: object, written: float) -> float | None:
        with self.stream.block(step, update, torch.device("cpu")) as carrier:
            seen = carrier.memory and float(carrier.memory.states[0].unique())
            carrier.memory = memory_of(written)
        return seen


def test_memory_follows_the_blocks():
    read = Reading()
    assert [read(step, step, float(step)) for step in range(3)] == [None, 0.0, 1.0]
    with pytest.raises(ValueError, match="block 7 of the stream came where block 3 follows"):
        read(7, 7, 7.0)
    assert read(0, 0, 0.0) is None, "a new epoch must not remember the last"


def test_a_repeated_pass_starts_from_the_same_memory():
    """One update of two batches, done twice; and a block that fails."""
    read = Reading()
    assert [read(step, "update 5", float(step)) for step in (0, 1, 0, 1)] == [None, 0.0, None, 0.0]
    with pytest.raises(RuntimeError, match="out of memory"):
        with read.stream.block(2, "update 6", torch.device("cpu")):
            raise RuntimeError("out of memory")
    assert read(2, "update 6", 2.0) == 1.0


def test_an_attempt_that_outlasts_an_epoch_reads_the_new_one():
    """Updates that overflow are not counted."""
    read = Reading()
    for epoch in (1.0, 2.0):
        read(0, "update 0", epoch)
        assert read(1, "update 0", epoch) == epoch


def test_memory_is_saved_as_plain_tensors():
    read = Reading()
    read(0, 0, 2.5)
    restored = StreamMemory.from_state_dict(read.stream.state_dict())
    assert restored.next_step == 1
    assert torch.equal(restored.memory.states[0], memory_of(2.5).states[0])
    assert StreamMemory.from_state_dict(StreamMemory().state_dict()).memory is None


def test_bits_are_of_the_likelihood_where_labels_are_smoothed():
    plain = {"loss": 8 * math.log(2), "ntokens": 4}
    smoothed = {"loss": 99.0, "nll_loss": 8 * math.log(2), "ntokens": 4}
    for output in (plain, smoothed):
        with metrics.aggregate() as logged:
            log_units([output], "char")
        assert logged.get_smoothed_values()["bpc"] == 2


def dictionary_of(*symbols: str) -> Dictionary:
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    return dictionary


@pytest.mark.parametrize(
    ("symbols", "level"), [("a b _", "char"), ("the cat", "word"), ("th@@ e", "subword"), ("\u2581th e", "subword")]
)
def test_what_a_token_is(tmp_path, symbols, level):
    assert text_level(tmp_path, dictionary_of(*symbols.split())) == level
    (tmp_path / "manifest.json").write_text('{"level": "byte"}')
    assert text_level(tmp_path, dictionary_of("the")) == "byte"
    assert text_level(tmp_path, dictionary_of("the"), "word") == "word"
    with pytest.raises(ValueError, match="text_level must be one of .*got 'phrase'"):
        text_level(tmp_path, dictionary_of("the"), "phrase")


@pytest.mark.parametrize("symbols", [("th@@", "e", "cat"), ("\u2581th", "e", "\u2581cat")])
def test_words_are_counted(symbols):
    dictionary = dictionary_of(*symbols)
    ends = word_ends(dictionary)
    line = dictionary.encode_line(" ".join(symbols), append_eos=True, add_if_not_exist=False)
    assert int(ends[line.long()].sum()) == 3  # two words and the end of the line
    data = StreamDataset("valid", line.numpy(), PAD, 2, word_ends=ends)
    words = sum(data.blocks(1)[step]["nwords"] for step in range(2))
    assert words == 3 - int(ends[line[0]])  # the first token is not predicted


def test_characters_outside_the_dictionary():
    dictionary = dictionary_of("a", "b")
    refuse_unknown_characters(np.array([4, 5, 2]), dictionary, "valid")
    with pytest.raises(ValueError, match="valid: 1 of 3 characters are outside the dictionary"):
        refuse_unknown_characters(np.array([4, dictionary.unk(), 2]), dictionary, "valid")
