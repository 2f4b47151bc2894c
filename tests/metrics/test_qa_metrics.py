"""Exact match and F1 against hand-computed cases of the official scripts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_fairseq.metrics.answer_scores import (
    Scored,
    best_scores,
    best_thresholds,
    exact_match,
    f1,
    normalise,
    normalise_mlqa,
    normaliser,
    score_file,
    summary,
    with_threshold,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat", "cat"),
        ("a  an the", ""),
        ("theatre", "theatre"),
        ("U.S.-based", "usbased"),
        ("the-end", "theend"),
        ("“curly” quotes", "“curly” quotes"),
        ("Straße\u00a0 10", "straße 10"),
        ("黑豹队，的", "黑豹队，的"),
        ("$5,000.00!", "500000"),
        ("", ""),
    ],
)
def test_squad_normalisation(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "The “Cat”, a", "cat"),
        ("de", "Die Katze des Nachbarn", "katze nachbarn"),
        ("de", "der Dieb", "dieb"),
        ("es", "El gato y la luna", "gato y luna"),
        ("vi", "những con mèo của tôi", "con mèo tôi"),
        ("zh", "在2015年，黑豹", "在 2015 年 黑 豹"),
        ("zh", "the Cat 猫", "the cat 猫"),
        ("ar", "البيت", "بيت"),
        ("hi", "बिल्ली।", "बिल्ली"),
    ],
)
def test_mlqa_normalisation(language, text, expected):
    assert normalise_mlqa(text, language) == expected


def test_unknown_language_or_metric():
    with pytest.raises(ValueError, match="not 'fr'"):
        normaliser("mlqa", "fr")
    with pytest.raises(ValueError, match="metric must be one of"):
        normaliser("bleu", "en")


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("the cat", "Cat!", 1.0),
        ("black cat", "the cat", 2 * 0.5 * 1 / 1.5),
        ("a b b c", "b b d", 2 * (2 / 3) ** 2 / (4 / 3)),  # "a" is an article: b b c
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("x y", "x y z w", 2 * 1 * 0.5 / 1.5),
    ],
)
def test_f1(prediction, gold, expected):
    assert f1(prediction, gold) == pytest.approx(expected)
    assert f1(prediction, gold, v2=True) == pytest.approx(expected)


def test_empty_answers():
    """SQuAD v1.1: nothing in common is 0; v2.0: both empty is 1."""
    assert f1("", "") == 0.0 and exact_match("", "") == 1.0
    assert f1("", "", v2=True) == 1.0
    assert f1("the", "", v2=True) == 1.0
    assert f1("cat", "", v2=True) == 0.0


def test_several_gold_answers():
    assert best_scores("10th century", ["the 10th century", "10th"]) == (1.0, 1.0)
    assert best_scores("in 10th", ["the 10th century", "10th"]) == (0.0, pytest.approx(2 / 3))
    assert best_scores("", [], v2=True) == (1.0, 1.0)
    assert best_scores("x", [], v2=True) == (0.0, 0.0)
    assert best_scores("", ["the", "a cat"], v2=True) == (0.0, 0.0)
    assert best_scores("", ["the"], v2=True) == (1.0, 1.0)


def test_mlqa_f1_by_characters():
    in_chinese = normaliser("mlqa", "zh")
    assert f1("黑豹队", "黑豹", in_chinese) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1("黑豹队", "黑豹") == 0.0


def test_summary_of_v2():
    scored = [Scored(1, 1), Scored(0, 0.5), Scored(1, 1, answerable=False)]
    found = summary(scored)
    assert found["exact"] == pytest.approx(200 / 3) and found["f1"] == pytest.approx(250 / 3)
    assert (found["HasAns_exact"], found["HasAns_f1"], found["HasAns_total"]) == (50, 75, 2)
    assert (found["NoAns_exact"], found["NoAns_total"]) == (100, 1)
    assert "HasAns_exact" not in summary(scored[:2])


def test_best_thresholds_by_hand():
    """Sorted by odds: right, wrong (F1 0.5), unanswerable though answered, right."""
    scored = [
        Scored(1, 1, True, odds=-5.0),
        Scored(0, 0.5, True, odds=-2.0),
        Scored(0, 0, False, odds=1.0),
        Scored(1, 1, True, odds=3.0),
    ]
    found = best_thresholds(scored)
    # Exact: 1 (all unanswerable), 2 at -5, 2, 1, 2.  F1: 1, 2, 2.5 at -2, 1.5, 2.5.
    assert found["best_exact"] == 50.0 and found["best_exact_thresh"] == -5.0
    assert found["best_f1"] == 62.5 and found["best_f1_thresh"] == -2.0


def test_nothing_beats_silence():
    """The official script calls that threshold 0; ours is one that gives the score."""
    scored = [Scored(0, 0, True, odds=-3.0), Scored(0, 0, False, odds=-2.0)]
    found = best_thresholds(scored)
    assert found["best_f1"] == 50.0
    assert found["best_f1_thresh"] == 0.0, "as the official script has it"
    assert summary(with_threshold(scored, found["reached_f1_thresh"]))["f1"] == 50.0
    assert best_thresholds([])["best_f1"] == 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-400, 400), st.booleans(), st.floats(0, 1)), min_size=1, unique_by=lambda one: one[0]
    )
)
def test_best_threshold_is_reached_and_never_beaten(rows):
    scored = [
        Scored(float(value > 0.5), value, True, odds / 10) if answerable else Scored(0.0, 0.0, False, odds / 10)
        for odds, answerable, value in rows
    ]
    found = best_thresholds(scored)
    for name in ("exact", "f1"):
        reached = summary(with_threshold(scored, found[f"reached_{name}_thresh"]))[name]
        assert reached == pytest.approx(found[f"best_{name}"])
        for threshold in [-math.inf, *(one.odds for one in scored)]:
            assert summary(with_threshold(scored, threshold))[name] <= reached + 1e-9


def test_missing_predictions():
    """SQuAD v1.1 counts them as wrong, v2.0 leaves them out."""
    from relpos_fairseq.data.squad import Question

    asked = [Question("q1", "?", 0, (), ("cat",)), Question("q2", "?", 0, (), ("dog",))]
    scored, missing = score_file({"q1": "the cat"}, asked)
    assert missing == ["q2"] and summary(scored)["exact"] == 50.0
    with_none = [*asked, Question("q3", "?", 0, (), (), answerable=False)]
    scored, missing = score_file({"q1": "cat", "q3": ""}, with_none, odds={"q1": -1.0})
    assert missing == ["q2"] and summary(scored)["total"] == 2
    assert [one.odds for one in scored] == [-1.0, 0.0]
    assert [one.answered for one in scored] == [True, False]
