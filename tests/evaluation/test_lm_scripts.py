"""`relpos evaluate length`, `evaluate lm` and `benchmark lm`: equal predictions, honest tables."""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import shutil
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fairseq.modules import AdaptiveSoftmax

from helpers.commands import relpos
from relpos_fairseq.data.streams.dataset import read_stream
from relpos_fairseq.evaluation import language_model, length
from relpos_fairseq.evaluation import perplexity as by_token
from relpos_fairseq.evaluation.language_model import Dynamic, score_dynamic
from relpos_fairseq.io.command import CONTINUE
from relpos_fairseq.lab.benchmarks import language_models as benchmark_lm


@pytest.fixture(scope="module")
def subject(recurrent, stream):
    loaded = language_model.load_subject(recurrent, stream, "valid")
    return replace(loaded, model=loaded.model.double())


def test_what_is_loaded(subject):
    assert (subject.trained_length, subject.trained_memory) == (8, 10)
    assert subject.longest is None and "transformer_xl" in subject.name
    assert len(language_model.last_targets(subject, None)) == len(subject.tokens) - 1
    with pytest.raises(ValueError, match="asked for the last 9999"):
        language_model.last_targets(subject, 9999)


def test_the_data_may_have_moved(recurrent, stream, subject, tmp_path):
    """What --data names is read, though the checkpoint names another folder."""
    shutil.copytree(stream, tmp_path / "moved")
    state = torch.load(recurrent, weights_only=True)
    state["cfg"]["task"]["data"] = str(tmp_path / "gone")
    torch.save(state, tmp_path / "checkpoint.pt")
    found = language_model.load_subject(tmp_path / "checkpoint.pt", tmp_path / "moved", "valid")
    assert (found.tokens == subject.tokens).all()


@pytest.mark.parametrize(("context", "stride", "batch"), [(5, 1, 3), (7, 3, 2), (4, 4, 1)])
def test_windows_score_each_token_with_its_context(subject, context, stride, batch):
    """Against one forward pass a window, written out; from the stream's very beginning."""
    targets = range(1, 30)
    found = language_model.score_with_windows(subject, targets, context, stride, batch)
    expected = 0.0
    for start in range(1, 30, stride):
        end = min(start + stride, 30)
        inputs = torch.tensor(subject.tokens[max(0, end - 1 - context) : end - 1][None].copy())
        subject.model.mem_len = 0
        with torch.no_grad():
            scores = subject.model(inputs.long())[0].log_softmax(-1)[0]
        for target in range(start, end):
            expected -= float(scores[target - end, int(subject.tokens[target])])
    assert found.tokens == 29
    assert found.nats == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("block", "rows"), [(3, 1), (8, 1), (5, 3), (100, 2)])
def test_memory_that_covers_the_stream_equals_one_pass(subject, block, rows):
    targets = range(len(subject.tokens) - 40, len(subject.tokens))
    found = language_model.score_with_memory(subject, targets, block, 500, rows)
    everything = len(subject.tokens) - 1
    whole = language_model.score_with_windows(subject, targets, everything, len(targets))
    assert found.tokens == whole.tokens == 40
    assert found.nats == pytest.approx(whole.nats, rel=1e-7)  # fairseq's log_softmax is fp32


def test_rows_change_nothing(subject):
    """Every row is warmed up as far as its memory reaches, layer by layer."""
    targets = range(len(subject.tokens) - 42, len(subject.tokens))
    scores = [language_model.score_with_memory(subject, targets, 1, 6, rows).nats for rows in (1, 3, 5)]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-7)


def test_models_side_by_side(recurrent, stream, shell):
    """`evaluate lm`: each as it was trained, or as asked; the numbers are those of the scorers."""
    said = shell("evaluate lm <recurrent> <absolute> --data <stream> --tokens 20")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in said.splitlines()[-2:]]
    assert [row[2] for row in rows] == ["memory 10", "window 8"]
    assert [row[3] for row in rows] == ["20", "20"]
    subject = language_model.load_subject(recurrent, stream, "valid")
    targets = language_model.last_targets(subject, 20)
    expected = language_model.score_with_memory(subject, targets, 8, 10, 4)
    assert float(rows[0][4]) == pytest.approx(expected.perplexity, abs=2e-3)
    assert float(rows[0][5]) == pytest.approx(expected.bits, abs=2e-4)


def points(folder) -> list[dict]:
    return list(csv.DictReader((folder / "length.csv").open()))


def test_lengths_of_a_model_with_memory(tmp_path, capsys, monkeypatch, shell):
    line = "evaluate length <recurrent> --data <stream> --out . --tokens 40 --lengths 4,8,16 --mem-len 0,10"
    shell(line)
    rows = points(tmp_path)
    assert [(row["kind"], row["length"]) for row in rows] == [
        *[("context", "4"), ("context", "8"), ("context", "16")],
        *[("memory", "0"), ("memory", "10")],
    ]
    assert all(row["tokens"] == "40" and float(row["perplexity"]) > 1 for row in rows)
    assert (tmp_path / "length.png").stat().st_size > 1000
    before = (tmp_path / "length.csv").read_bytes()
    with monkeypatch.context() as stopped:
        stopped.setattr(length, "run_stages", Mock(side_effect=KeyboardInterrupt))
        assert relpos(*shell.words(line)) == 130
    assert capsys.readouterr().err.endswith(CONTINUE + "\n")
    monkeypatch.setattr(length, "score_with_windows", None)  # nothing is done twice
    monkeypatch.setattr(length, "score_with_memory", None)
    assert shell(line).count("unchanged") == 5
    assert (tmp_path / "length.csv").read_bytes() == before


def test_a_table_that_ends_is_reported(tmp_path, shell):
    shell("evaluate length <absolute> --data <stream> --out . --tokens 40")
    rows = points(tmp_path)
    assert [row["length"] for row in rows] == ["4", "8", "16", "32", "64", "128"]
    assert [row["status"].startswith("cannot: its table has 8 pos") for row in rows] == [*[False] * 2, *[True] * 4]
    assert (tmp_path / "length.png").exists()


def test_the_trained_length_is_always_scored(tmp_path, shell):
    """Without it nothing could be said of the others."""
    shell("evaluate length <recurrent> --data <stream> --out . --tokens 40 --lengths 16 --mem-len 20")
    found = [(row["kind"], row["length"]) for row in points(tmp_path)]
    assert found == [("context", "8"), ("context", "16"), ("memory", "10"), ("memory", "20")]


def test_lengths_are_chosen_one_way() -> None:
    assert length.chosen([16, 4, 16], "--lengths", 1, 8) == [4, 8, 16]
    assert length.chosen(None, "--lengths", 1, 8) == [4, 8, 16, 32, 64, 128]
    assert length.chosen(None, "--mem-len", 0, 6, [0, 12]) == [0, 6, 12]
    assert length.chosen([], "--mem-len", 0, 6) == []


def test_what_gets_worse_is_said(subject):
    found = {4: 9.0, 8: 4.0, 16: 4.1, 32: 8.0}
    rows = [{"kind": "context", "length": n, "perplexity": found[n], "status": "ok"} for n in found]
    told = [row["status"] for row in length.judged(rows, subject)]
    assert told == ["ok", "ok", "ok", "does not extrapolate: perplexity x2.00"]


def test_the_benchmark(tmp_path, shell):
    models = "<recurrent> --baseline <absolute> --data <stream> --tokens 40 --sliding-tokens 8"
    said = shell(f"benchmark lm {models} --train-updates 2 --train-batch-size 2 --threads 1 --out speed.json")
    found = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["method"], row["predictions"]) for row in found["evaluation"]] == [
        *[("memory", 40), ("memory", 8), ("strided window", 40), ("sliding window", 8)],
        *[("strided window", 0), ("sliding window", 0)],  # the table of eight ends before 18
    ]
    assert {row["context"] for row in found["evaluation"]} == {18}
    assert len(found["training"]) == 2
    assert "cannot: table of 8" in said


def test_memory_and_segment_make_up_the_context(subject, monkeypatch):
    """Of rows that are shorter than a segment, too, and each set of predictions by itself."""
    asked = []

    def score(subject, targets, block, mem_len, rows):
        asked.append((len(targets), block, mem_len))
        return language_model.Score(len(targets), 1.0, 1.0)

    monkeypatch.setattr(benchmark_lm, "score_with_memory", score)
    monkeypatch.setattr(benchmark_lm, "score_with_windows", lambda *_: language_model.Score(9, 1.0, 1.0))
    options = argparse.Namespace(tokens=40, sliding_tokens=9, batch_size=2)
    benchmark_lm.evaluation(subject, None, 18, options)
    assert asked == [(40, 8, 10), (9, 5, 13)]


@pytest.mark.parametrize("rows", [1, 3])
def test_every_prediction_is_scored_in_order(subject, rows):
    """Against a pass over each segment, with its place and the memory that it had."""
    targets = range(30, 47)
    found = language_model.score_with_memory(subject, targets, 4, 6, rows)
    assert found.nats == pytest.approx(found.each.sum())
    size, expected = -(-17 // rows), []
    for piece in (targets[n : n + size] for n in range(0, 17, size)):
        memory, start = None, piece.start - 1
        # Blocks end where the piece begins: warming up, and then its own.
        warm = list(range(start - 12, start, 4))
        for begin in [*warm, *range(start, piece.stop - 1, 4)]:
            ids = torch.from_numpy(subject.tokens[begin : begin + 4].astype(int))[None]
            slots = 0 if memory is None else int(memory.valid.sum())
            with torch.no_grad():
                logits, extra = subject.model(ids, memory=memory)
            memory = extra["memory"]
            for place in range(4):
                if begin + place + 1 in piece and begin >= start:
                    target = int(subject.tokens[begin + place + 1])
                    nats = -float(logits[0].log_softmax(-1)[place, target])
                    expected.append((nats, place, slots))
    nats, places, slots = zip(*expected, strict=True)
    assert found.each == pytest.approx(np.array(nats), abs=2e-6)  # scores are fp32
    assert found.place.tolist() == list(places) and found.memory.tolist() == list(slots)


def test_windows_know_the_place_of_a_prediction(subject):
    found = language_model.score_with_windows(subject, range(1, 30), 6, 3, 2)
    assert found.place.tolist() == [0, 1, 2, 3, 4, 5] + [3, 4, 5] * 7 + [4, 5]
    assert not found.memory.any()


def test_dynamic_evaluation_learns_from_what_it_scored(subject):
    """Krause's equation by hand, with a copy of the model; the model itself is as before."""
    model, targets = copy.deepcopy(subject.model), range(30, 42)
    model.mem_len = 6
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    found = score_dynamic(subject, targets, 4, 6, Dynamic(0.05, 0.1))
    expected, memory = [], None
    for begin in range(17, 41, 4):
        ids = torch.from_numpy(subject.tokens[begin : begin + 5].astype(int))[None]
        logits, extra = model(ids[:, :4], memory=memory)
        memory = extra["memory"]
        if begin < 29:
            continue
        losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")
        expected += losses.tolist()
        model.zero_grad()
        losses.mean().backward()
        with torch.no_grad():
            for name, value in model.named_parameters():
                step = -0.05 * value.grad if value.grad is not None else 0.0
                value += step + 0.1 * (before[name] - value)
    assert found.each == pytest.approx(np.array(expected), abs=5e-6)
    still = language_model.score_with_memory(subject, targets, 4, 6)
    assert abs(found.nats - still.nats) > 1e-3 and found.each[:4] == pytest.approx(still.each[:4])
    for name, value in subject.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_an_adaptive_softmax_is_scored_by_its_bands(subject):
    """As fairseq's log-probabilities of all words, with gradients, by which dynamic evaluation learns."""
    torch.manual_seed(3)
    subject = replace(subject, model=copy.deepcopy(subject.model))
    decoder = subject.model.decoder
    words = len(decoder.dictionary)
    decoder.adaptive_softmax = AdaptiveSoftmax(words, decoder.output_embed_dim, [6, 9], dropout=0.2).double().eval()
    targets = torch.randint(4, words, (3, 5))
    targets[1, 3:], targets[2] = subject.pad, 7  # no target of the last band in row 2
    features = torch.randn(3, 5, decoder.output_embed_dim, dtype=torch.double, requires_grad=True)
    with torch.no_grad():
        every = decoder.adaptive_softmax.get_log_prob(features, None).gather(-1, targets[..., None])[..., 0]
    found = language_model.log_likelihood(subject, features, targets)
    torch.testing.assert_close(found, every.masked_fill(targets.eq(subject.pad), 0))
    torch.autograd.gradcheck(lambda x: language_model.log_likelihood(subject, x, targets), features)
    learned = score_dynamic(subject, range(30, 42), 4, 6, Dynamic(0.05, 0.1))
    still = language_model.score_with_memory(subject, range(30, 42), 4, 6)
    assert learned.each[:4] == pytest.approx(still.each[:4]) and abs(learned.nats - still.nats) > 1e-3


def test_rms_scales_what_dynamic_evaluation_learns(subject, stream):
    """The paper's equations element by element, from gradients of segments of the training text."""
    targets, rate, decay, epsilon, tokens = range(30, 42), 0.003, 0.2, 0.01, 13
    model = copy.deepcopy(subject.model)
    model.mem_len = 6
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    words = subject.model.decoder.dictionary
    training = read_stream(stream / "train", words, None, False)

    def segments(stream, first, last):
        memory = None
        for begin in range(first, last, 4):
            ids = torch.from_numpy(stream[begin : min(begin + 4, last) + 1].astype(int))[None]
            logits, extra = model(ids[:, :-1], memory=memory)
            memory = extra["memory"]
            model.zero_grad()
            losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")
            losses.mean().backward()
            grads = {n: v.grad.numpy() for n, v in model.named_parameters() if v.grad is not None}
            yield begin, losses.tolist(), grads

    statistics = [grads for _, _, grads in segments(training, 0, tokens)]
    rms = {n: np.sqrt(np.mean([g[n] ** 2 for g in statistics], 0)) for n in statistics[0]}
    average = np.concatenate([value.ravel() for value in rms.values()]).mean()
    assert len(statistics) == 4 and len(rms) == len(before)
    assert any((value / average > 1 / decay).any() for value in rms.values())  # some are clipped
    expected = []
    for begin, losses, grads in segments(subject.tokens, 17, 41):
        if begin < 29:
            continue
        expected += losses
        for name, value in model.named_parameters():
            pull = np.minimum(rms[name] / average, 1 / decay) * decay
            step = -rate * grads[name] / (rms[name] + epsilon)
            value.data += torch.from_numpy(step + pull * (before[name] - value.data).numpy())
    dynamic = Dynamic(rate, decay, stream / "train", tokens, epsilon)
    found = score_dynamic(subject, targets, 4, 6, dynamic)
    assert found.each == pytest.approx(np.array(expected), abs=5e-6)
    plain = score_dynamic(subject, targets, 4, 6, Dynamic(rate, decay))
    assert abs(found.nats - plain.nats) > 1e-3
    for name, value in subject.model.named_parameters():
        assert torch.equal(value, before[name])


def test_lines_and_pictures_of_every_token(recurrent, stream, tmp_path, shell):
    """The lines add up to the table, and each names its token; both models in one picture."""
    out, given = tmp_path / "out.jsonl", "--data <stream> --tokens 20"
    said = shell(f"evaluate lm <recurrent> <absolute> {given} --by-token out.jsonl")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    subject = language_model.load_subject(recurrent, stream, "valid")
    words = subject.model.decoder.dictionary
    assert len(lines) == 40 and lines[0]["reads"] == "memory 10" and lines[20]["memory"] == 0
    for line in lines:
        assert line["token"] == words[int(subject.tokens[line["index"]])]
    for part in (lines[:20], lines[20:]):
        assert f"{sum(line['nats'] for line in part) / 20 / math.log(2):.4f}" in said
        assert len({line["checkpoint"] for line in part}) == 1
    picture = (tmp_path / "out.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    several = "--mem-len 0 4 10 --dynamic 0.01 --by-token out.jsonl"
    assert "memory 4, dynamic" in shell(f"evaluate lm <recurrent> {given} {several}")
    scaled = "--dynamic 0.0001 --rms 40 --epsilon 0.01"
    assert "memory 10, dynamic (RMS)" in shell(f"evaluate lm <recurrent> {given} {scaled}")


def test_neighbouring_places_are_put_together():
    place = np.array([0, 1, 2, 3, 4, 0, 1])
    score = language_model.Score(7, 0.0, 1.0, np.arange(7) * math.log(2), place, place)
    places, bits = by_token.by_place(score, points=3)  # 0 and 1, 2 and 3, 4
    assert places.tolist() == [0.5, 2.5, 4.0] and bits == pytest.approx([3.0, 2.5, 4.0])


@pytest.mark.parametrize("kind", ["<recurrent>", "<absolute>"])
def test_pictures_are_drawn_of_the_text(kind, shell):
    """A stream's first block, of language models with memory and without."""
    assert "first sentence of valid" in shell(f"plot {kind} --data <stream> --out .")
