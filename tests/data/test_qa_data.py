"""Reading, windows, features, decoding: gold spans come back whole, whatever the windows."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.data.metrics import squad_metrics

from helpers import FULL, ROOT
from helpers.questions import make_file, question, squad
from relpos_fairseq.criterions.question_answering import predictions, read_table, score_sums
from relpos_fairseq.data.answer_spans import (
    IGNORED,
    Context,
    PredictionOptions,
    QuestionEncoder,
    Shape,
    Window,
    best_window,
    predict,
    targets,
    windows,
)
from relpos_fairseq.data.squad import read_questions, read_squad
from relpos_fairseq.metrics.answer_scores import best_scores, best_thresholds, normalise, score_file, summary
from relpos_fairseq.tasks.question_answering import QuestionDataset
from relpos_fairseq.text import load_tokenizer, train_tokenizer

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
SHARED = ROOT.parent / "shared" / "data" / "squad"
FILES = ["squad-v2.0-sample", "xquad.en", "xquad.de", "xquad.zh", "xquad.ar"]
KINDS = ["bpe", "sentencepiece"]
# Each file with one kind of pieces, by turns; each night with both.
READ = [(name, kind) for n, name in enumerate(FILES) for m, kind in enumerate(KINDS) if FULL or (n + m) % 2 == 0]
LONG = PredictionOptions(n_best=2, max_answer_length=10_000)


def dictionary_of(folder: Path) -> Dictionary:
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    return dictionary


def encoder_of(folder: Path, **shape) -> QuestionEncoder:
    return QuestionEncoder(load_tokenizer(folder), dictionary_of(folder), Shape(**shape))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    text = ["The red cat is in Paris today. Where is the dog?", "Ünïcödé 中文 café 😀"]
    train_tokenizer("bpe", path, texts=text, vocab_size=300)
    return path


def written(path: Path, *contexts: tuple[str, list[dict]]) -> Path:
    """Write a file of questions about each context."""
    path.write_text(json.dumps(squad(list(contexts))))
    return path


def round_trip(encoded, dictionary, unanswerable):
    """Give each gold target a high logit, decode, and compare with the gold texts."""
    dataset = QuestionDataset(encoded, dictionary, False, unanswerable)
    scores = []
    for first in range(0, len(dataset), 64):
        batch = dataset.collater([dataset[n] for n in range(first, min(first + 64, len(dataset)))])
        logits = torch.zeros(*batch["net_input"]["src_tokens"].shape, 2)
        for side, name in enumerate(("start", "end")):
            rows = batch[name].ne(IGNORED).nonzero().flatten()
            logits[rows, batch[name][rows], side] = 10.0
        logits = logits.masked_fill(~batch["allowed"][..., None], float("-inf"))
        for asked, one in zip(batch["asked"], predictions(batch, logits, LONG), strict=True):
            scores.append((best_scores(one.text, asked.question.gold, normalise, unanswerable), asked, one))
    return scores


@functools.lru_cache(maxsize=8)
def shared_file(name: str):
    path = SHARED / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"no real text: {path} is absent")
    return read_questions(path, "fail")


@pytest.fixture(scope="module")
def fine(tmp_path_factory):
    """Tokenizers whose pieces are characters or parts of one: every range of text is a span."""
    if not SHARED.is_dir():
        pytest.skip(f"no real text: {SHARED} is absent")
    texts = [c for name in FILES for c in shared_file(name).contexts]
    texts += [q.text for name in FILES for q in shared_file(name).questions]
    bpe, pieces = (tmp_path_factory.mktemp(kind) for kind in KINDS)
    train_tokenizer("bpe", bpe, texts=texts[:100], vocab_size=256)  # bytes are the same of any text
    options = {"vocab_size": 4000, "model_type": "char", "character_coverage": 1.0}
    train_tokenizer("sentencepiece", pieces, texts=texts, **options)
    return dict(zip(KINDS, (bpe, pieces), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), READ)
def test_every_shared_gold_span_round_trips(fine, name, kind):
    encoder = encoder_of(fine[kind], max_query_length=4000, tokens_per_sample=2048, doc_stride=700)
    source = shared_file(name)
    scores = round_trip(encoder.encode(source, False), encoder.dictionary, source.unanswerable)
    wrong = [(a.question.id, p.text, a.question.gold) for (em, _), a, p in scores if em < 1]
    assert not wrong
    assert all(overlap == pytest.approx(1) for (_, overlap), _, _ in scores)
    assert len(scores) == len(source.questions)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES if FULL else FILES[::3])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_stride_and_length_round_trips(fine, name, data):
    kind = data.draw(st.sampled_from(KINDS))
    shape = {"tokens_per_sample": data.draw(st.integers(1300, 3000)), "doc_stride": data.draw(st.integers(100, 3000))}
    encoder = encoder_of(fine[kind], max_query_length=1200, on_long_question="truncate", **shape)
    source = shared_file(name)
    encoded = encoder.encode(source, False)
    for part in ("questions", "asked", "spans"):
        setattr(encoded, part, getattr(encoded, part)[::23])
    for (exact, overlap), asked, one in round_trip(encoded, encoder.dictionary, source.unanswerable):
        assert (exact, overlap) == (1.0, pytest.approx(1.0)), (asked.question, one.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xquad.zh", "xquad.ar"] if FULL else ["xquad.ar"])
@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "sentencepiece"])
def test_subwords_miss_only_answers_that_end_within_a_piece(tmp_path, name, kind):
    """With real vocabularies an answer can end within a piece: then the pieces around it."""
    source = shared_file(name)
    train_tokenizer(kind, tmp_path, texts=source.contexts, vocab_size=6000)
    encoder = encoder_of(tmp_path, max_query_length=500, tokens_per_sample=1024, doc_stride=97)
    scores = round_trip(encoder.encode(source, False), encoder.dictionary, source.unanswerable)
    exact = 100 * sum(em for (em, _), _, _ in scores) / len(scores)
    assert exact > 97
    for (em, _), asked, one in scores:
        if em < 1:
            answer = asked.question.answers[0]
            end = answer.start + len(answer.text)
            assert answer.text in one.text or one.text in answer.text
            ends = {*asked.context.begins.tolist(), *asked.context.ends.tolist()}
            assert answer.start not in ends or end not in ends


LETTERS = st.text(st.sampled_from("ab cé中😀e\u0301 .العمل"), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    train_tokenizer("bpe", folder, texts=["a"], vocab_size=256)
    return folder


@QUICK
@given(context=LETTERS, length=st.integers(8, 60), stride=st.integers(1, 60), data=st.data())
def test_any_span_of_any_text_round_trips(byte_level, context, length, stride, data):
    """Also where no window holds the answer: windows that do not overlap, room for three pieces."""
    start = data.draw(st.integers(0, len(context) - 1))
    answer = context[start : data.draw(st.integers(start + 1, len(context)))]
    entry = {"id": "q", "question": "a", "answers": [{"text": answer, "answer_start": start}]}
    source = read_questions(written(byte_level / "one.json", (context, [entry])))
    encoder = encoder_of(byte_level, tokens_per_sample=length, doc_stride=stride)
    encoded = encoder.encode(source, False)
    if encoded.answer(0) is None:
        assert not answer.strip()
        return
    [(_, asked, one)] = round_trip(encoded, encoder.dictionary, False)
    assert one.text == answer.strip()


def naive_windows(length, room, stride):
    """BERT's loop, word for word."""
    spans, start = [], 0
    while start < length:
        size = min(length - start, room)
        spans.append((start, size))
        if start + size == length:
            break
        start += min(size, stride)
    return spans


@QUICK
@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 60))
def test_windows(length, room, stride):
    found = windows(length, room, stride)
    assert [(one.start, one.length) for one in found] == naive_windows(length, room, stride)
    assert {n for one in found for n in range(one.start, one.end)} == set(range(length))
    for piece in range(length):
        best = best_window(found, piece, piece)
        values = [
            min(piece - one.start, one.end - 1 - piece) + 0.01 * one.length if one.holds(piece) else -1 for one in found
        ]
        assert values[best] == max(values)


def test_an_empty_context_has_a_window():
    assert windows(0, 10, 5) == (Window(0, 0),)


def test_targets():
    spans = (Window(0, 5), Window(3, 5), Window(6, 5))
    assert targets(spans, (3, 4), 10) == [(13, 14), (10, 11), (0, 0)]
    assert targets(spans, None, 10) == [(0, 0)] * 3
    assert targets(spans, (2, 9), 10) == [(12, -1), (0, 0), (-1, 13)]
    apart = (Window(0, 5), Window(5, 5))
    assert targets(apart, (4, 5), 7) == [(11, IGNORED), (IGNORED, 7)]


def naive_best(spans, starts, ends, options):
    """Every span of every window, BERT's rules as loops."""
    best = {}
    for one, start, end in zip(spans, starts, ends, strict=True):
        for a in range(one.length):
            for b in range(a, min(one.length, a + options.max_answer_length)):
                span = (one.start + a, one.start + b)
                room = min(a, one.length - 1 - b) + 0.01 * one.length
                if span not in best or room > best[span][0]:
                    best[span] = (room, start[a] + end[b])
    return max((score, (-span[0], -span[1])) for span, (_, score) in best.items())


@QUICK
@given(st.integers(1, 25), st.integers(2, 12), st.integers(1, 6), st.integers(1, 8), st.integers(0, 10_000))
def test_decoding_equals_a_search_over_everything(length, room, stride, longest, seed):
    spans = windows(length, room, min(stride, room))
    generator = np.random.default_rng(seed)
    starts, ends = ([generator.normal(size=one.length) for one in spans] for _ in range(2))
    text = "".join(chr(ord("a") + n % 26) + "_" for n in range(length))
    begins = np.arange(length) * 2
    context = Context(np.zeros(length), begins, begins + 2)
    options = PredictionOptions(n_best=30, max_answer_length=longest)
    found = predict(context, text, spans, starts, ends, None, options)
    score, (first, last) = naive_best(spans, starts, ends, options)
    assert found.n_best[0].score >= score - 1e-9  # a span that no window holds may score higher
    if len(spans) == 1:
        assert found.text == text[-2 * first : -2 * last + 2]
    assert sum(one.probability for one in found.n_best) == pytest.approx(1)
    assert [one.score for one in found.n_best] == sorted(o.score for o in found.n_best)[::-1]


def test_null_score_and_threshold():
    context = Context(np.zeros(3), np.array([0, 2, 4]), np.array([1, 3, 5]))
    spans = (Window(0, 2), Window(1, 2))
    starts, ends = [np.array([0.0, 3.0]), np.array([1.0, 0.0])], [np.array([0.0, 2.0])] * 2
    nulls = [9.0, 6.0]
    for threshold, said in ((1.5, "b"), (0.0, ""), (1.0, "b"), (0.99, "")):
        options = PredictionOptions(null_threshold=threshold)
        found = predict(context, "a b c", spans, starts, ends, nulls, options)
        assert found.best == "b" and found.odds == 1.0 and found.text == said
    assert [one.text for one in found.n_best][0] == ""
    assert found.n_best[0].probability == pytest.approx(np.exp(6) / sum(np.exp(one.score) for one in found.n_best))
    without = predict(context, "a b c", spans, starts, ends, None, PredictionOptions())
    assert without.text == "b" and without.odds == 0


def test_long_answers_are_left_out():
    context = Context(np.zeros(4), np.arange(4), np.arange(1, 5))
    start, end = np.array([5.0, 0, 0, 0]), np.array([0.0, 0, 0, 5])
    one = (Window(0, 4),)
    assert predict(context, "abcd", one, [start], [end], None, LONG).text == "abcd"
    short = PredictionOptions(max_answer_length=3)
    assert predict(context, "abcd", one, [start], [end], None, short).text in ("a", "abc", "ab")
    assert predict(context, "", (Window(0, 0),), [start[:0]], [end[:0]], None, LONG).text == ""


def test_samples(folder, tmp_path):
    """`<s> question </s></s> context </s>`, segments, and where an answer may stand."""
    context = "The red cat is in Paris today."
    path = written(tmp_path / "f.json", (context, [question("q", context, "Where?", "Paris")]))
    for separators in (1, 2):
        encoder = encoder_of(folder, separators=separators, tokens_per_sample=64)
        encoded = encoder.encode(read_questions(path), True)
        dataset = QuestionDataset(encoded, encoder.dictionary, True, False)
        batch = dataset.collater([dataset[0]])
        symbols = [encoder.dictionary[n] for n in batch["net_input"]["src_tokens"][0]]
        asked = encoder.tokenizer.encode("Where?").pieces
        said = encoder.tokenizer.encode(context).pieces
        between = ["</s>"] * separators
        assert symbols == ["<s>", *asked, *between, *said, "</s>"]
        segments = batch["net_input"]["segments"][0].tolist()
        assert segments == [0] * (len(asked) + 2) + [1] * (separators - 1 + len(said) + 1)
        first = len(asked) + 1 + separators
        assert batch["allowed"][0].nonzero().flatten().tolist() == [0, *range(first, first + len(said))]
        start, end = batch["start"].item(), batch["end"].item()
        assert "".join(symbols[start : end + 1]) == "ĠParis"


def test_batches_do_not_change_scores(folder, tmp_path):
    """Sums over any batches are those of the whole, the v2.0 table included."""
    path = make_file(tmp_path / "v2.json", 9, 3, unanswerable=True)
    encoder = encoder_of(folder, tokens_per_sample=40, doc_stride=7)
    encoded = encoder.encode(read_questions(path), False)
    dataset = QuestionDataset(encoded, encoder.dictionary, False, True)
    torch.manual_seed(1)
    noise = [torch.randn(len(spans), 40, 2) for spans in encoded.spans]

    def sums(batches):
        total = {}
        for batch in batches:
            sample = dataset.collater([dataset[n] for n in batch])
            width = sample["allowed"].size(1)
            logits = torch.cat([noise[n] for n in batch])[:, :width]
            logits = logits.masked_fill(~sample["allowed"][..., None], float("-inf"))
            found = score_sums(sample, predictions(sample, logits, PredictionOptions()))
            for key, value in found.items():
                total[key] = total.get(key, 0) + value
        return total

    everything = sums([list(range(27))])
    for size in (1, 4):
        order = list(range(26, -1, -1))
        other = sums([order[n : n + size] for n in range(0, 27, size)])
        for key, value in everything.items():
            assert torch.equal(torch.as_tensor(other[key]), torch.as_tensor(value)), key
    rows = read_table(everything["_table"])
    assert len(rows) == 27 == everything["_total"]
    assert everything["_no_total"] == 9 and everything["_has_total"] == 18
    assert best_thresholds(rows)["best_f1"] >= 100 * everything["_f1"] / 27 - 1e-9
    assert "questions" in str(everything["_table"].tolist())
    # A question whose windows are more tokens than fit is alone, not an AssertionError.
    costs = [dataset.num_tokens(n) for n in range(27)]
    limit = sorted(costs)[13]
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=limit)
    assert sorted(n for batch in batches for n in batch) == list(range(27))
    assert all(len(batch) == 1 or max(costs[n] for n in batch) <= limit for batch in batches)
    assert max(costs) > limit


PARAGRAPH, ASKED = '{"data": [{"paragraphs": [%s]}]}', '{"data": [{"paragraphs": [{"context": "a", "qas": [%s]}]}]}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"is not SQuAD's format \(the whole is \[\], and must be an object\)"),
        ("{", "is not SQuAD's format .*line 1 column 2"),
        ('{"data": {}}', "is not SQuAD's format .data is {}, and must be a list"),
        ('{"data": [{}]}', "data/0/paragraphs is missing"),
        (PARAGRAPH % '{"qas": []}', "paragraphs/0/context is missing"),
        (PARAGRAPH % '{"context": 1, "qas": []}', "context is 1, and must be a text"),
        (PARAGRAPH % '{"context": "a\\ud83d", "qas": []}', "half of a character"),
        (ASKED % "", "holds no question"),
        (ASKED % "{}", "qas/0/id is missing"),
        (ASKED % '{"id": "x", "question": "?"}', "id 'x' has no answer and is not marked"),
        (
            ASKED % '{"id": "x", "question": "", "is_impossible": "_"}',
            "'x': is_impossible must be true or false, got '_'",
        ),
        (ASKED % '{"id": true, "question": "?"}', "qas/0/id is true, and must be"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_questions(path)
    assert "wrong.json" in str(caught.value)


A_DOG, NOTHING = [{"text": "a dog", "answer_start": 4}], []
AS_PEOPLE_WRITE = {  # an entry without its question; whether it has an answer; the offsets of its answers
    "plain": ({"id": "plain", "answers": A_DOG}, True, [4]),
    "impossible": ({"id": "impossible", "answers": NOTHING, "is_impossible": True}, False, []),
    "false in text": ({"id": "f", "answers": A_DOG, "is_impossible": "false"}, True, [4]),
    "true in text": ({"id": "t", "answers": NOTHING, "is_impossible": " True"}, False, []),
    "a flag of 0": ({"id": "0", "answers": A_DOG, "is_impossible": 0}, True, [4]),
    "a flag of 1.0": ({"id": "1", "answers": NOTHING, "is_impossible": 1.0}, False, []),
    "an offset in text": ({"id": "ot", "answers": [{"text": "a dog", "answer_start": "4"}]}, True, [4]),
    "a whole float": ({"id": "wf", "answers": [{"text": "a dog", "answer_start": 4.0}]}, True, [4]),
    "no offset": ({"id": "no", "answers": [{"text": "a dog"}]}, True, []),
    "a null offset": ({"id": "nu", "answers": [{"text": "a dog", "answer_start": None}]}, True, []),
    "a number": ({"id": 7, "answers": A_DOG}, True, [4]),
    "a float": ({"id": 8.0, "answers": A_DOG}, True, [4]),
    "answers though impossible": ({"id": "ai", "answers": A_DOG, "is_impossible": True}, True, [4]),
    "no flag": ({"id": "nf", "answers": NOTHING}, False, []),
    "null answers": ({"id": "na", "answers": None, "is_impossible": True}, False, []),
    "null flag": ({"id": "nfl", "answers": A_DOG, "is_impossible": None}, True, [4]),
    "no answers at all": ({"id": "naa", "is_impossible": True}, False, []),
    "an answer of an article": ({"id": "the", "answers": [{"text": "the", "answer_start": 14}]}, True, [14]),
}


def test_questions_as_people_write_them(tmp_path, caplog):
    """Whether there is an answer, and scores, as SQuAD v2.0's own script has them (transformers keeps it)."""
    entries = [{"question": "?", **entry} for entry, _, _ in AS_PEOPLE_WRITE.values()]
    path = written(tmp_path / "f.json", ("saw a dog, or the cat", entries))
    found = read_questions(path, "drop")
    asked = dict(zip(AS_PEOPLE_WRITE, found.questions, strict=True))
    assert {name: one.answerable for name, one in asked.items()} == {n: w for n, (_, w, _) in AS_PEOPLE_WRITE.items()}
    starts = {name: [answer.start for answer in one.answers] for name, one in asked.items()}
    assert starts == {name: wanted for name, (_, _, wanted) in AS_PEOPLE_WRITE.items()}
    assert asked["a number"].id == "7" and asked["a float"].id == "8"
    for said in (
        "2 ids that are numbers",
        "4 questions with an answer_start",
        "4 questions whose is_impossible is neither",
        "1 questions with answers that are marked is_impossible",
        "1 questions without an answer that are not marked",
    ):
        assert said in caplog.text
    for answers in (itertools.repeat("a dog"), itertools.repeat(""), itertools.cycle(["dog", "", "the"])):
        given = {one.id: text for one, text in zip(found.questions, answers, strict=False)}
        scored, missing = score_file(given, found.questions)
        whole = [
            SimpleNamespace(qas_id=one.id, answers=entry.get("answers") or [])
            for one, entry in zip(found.questions, entries, strict=True)
        ]
        official, ours = squad_metrics.squad_evaluate(whole, given), summary(scored)
        assert not missing
        for name in ("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"):
            assert ours[name] == pytest.approx(official[name])
    again = json.dumps(read_squad(path))
    caplog.clear()
    path.write_text(again)
    assert [replace(one, article=0) for one in read_questions(path).questions] == found.questions
    assert not any(said in caplog.text for said in ("answer_start that is", "marked", "numbers"))


def test_absent_and_truncated_files(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_questions(tmp_path / "absent.json")
    whole = gzip.compress(json.dumps(squad([])).encode() * 50)
    (tmp_path / "half.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="half.json.gz.*truncated|half.json.gz is not SQuAD"):
        read_questions(tmp_path / "half.json.gz")


def test_duplicated_ids(tmp_path):
    twice = [("a b", [question("same", "a b", "?", "a")])] * 2
    with pytest.raises(ValueError, match="id 'same' occurs twice"):
        read_questions(written(tmp_path / "f.json", *twice))


def test_answers_that_are_not_at_their_offset(tmp_path, folder, caplog):
    answers = {"moved": ("cat", 7), "nowhere": ("cow", 0), "good": ("dog", 4)}
    entries = [
        {"id": name, "question": "?", "answers": [{"text": text, "answer_start": start}]}
        for name, (text, start) in answers.items()
    ]
    path = written(tmp_path / "f.json", ("cat dog cat", entries))
    dropped = read_questions(path, "drop")
    assert [len(q.answers) for q in dropped.questions] == [0, 0, 1]
    assert [q.gold for q in dropped.questions] == [("cat",), ("cow",), ("dog",)]
    assert "2 answers" in caplog.text and "id 'moved': 'cat' at 7" in caplog.text
    kept = read_questions(path, "keep")
    assert [[a.start for a in q.answers] for q in kept.questions] == [[8], [], [4]]
    with pytest.raises(ValueError, match=r"f.json: 2 answers .*id 'moved'.*--on-bad-answer"):
        read_questions(path, "fail")
    encoder = encoder_of(folder)
    assert len(encoder.encode(dropped, training=True).questions) == 1
    assert len(encoder.encode(dropped, training=False).questions) == 3
    assert "2 questions left out of training" in caplog.text


def test_long_questions(tmp_path, folder, caplog):
    entries = [question("long", "a b", "why " * 30, "a"), question("short", "a b", "a?", "b")]
    source = read_questions(written(tmp_path / "f.json", ("a b", entries)))
    with pytest.raises(ValueError, match=r"f.json: 1 questions longer .* 16: 'long' \(\d+ pieces\)"):
        encoder_of(folder, max_query_length=16).encode(source, True)
    cut = encoder_of(folder, max_query_length=16, on_long_question="truncate").encode(source, True)
    assert [len(asked) <= 16 for asked in cut.asked] == [True, True]
    dropping = encoder_of(folder, max_query_length=16, on_long_question="drop")
    assert [q.id for q in dropping.encode(source, True).questions] == ["short"]
    every = dropping.encode(source, False)  # an evaluation without it would flatter the score
    assert [q.id for q in every.questions] == ["long", "short"] and len(every.asked[0]) == 16
    assert "truncated" in caplog.text and "dropped" in caplog.text
    with pytest.raises(ValueError, match="id 'short': --tokens-per-sample 6 leaves no room"):
        encoder_of(folder, max_query_length=16, on_long_question="drop", tokens_per_sample=6).encode(source, True)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"doc_stride": 0}, "--doc-stride must be 1 or more"),
        ({"on_long_question": "cut"}, "must be one of fail, truncate, drop"),
        ({"separators": 3}, "separators must be 1 or 2"),
    ],
)
def test_wrong_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        Shape(**shape)


def test_another_dictionary(folder):
    with pytest.raises(ValueError, match="dict.txt lacks"):
        QuestionEncoder(load_tokenizer(folder), Dictionary(), Shape())


def test_tydiqa_ids_tell_the_language(tmp_path):
    path = written(tmp_path / "f.json", ("a b", [question("finnish-123-0", "a b", "?", "a")]))
    assert read_questions(path).questions[0].language == "fi"
