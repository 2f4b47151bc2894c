"""Statistics of comparisons: closed forms, sacrebleu, scikit-learn, simulation."""

from __future__ import annotations

import runpy
from itertools import product

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF
from scipy.stats import pearsonr
from sklearn.metrics import f1_score, matthews_corrcoef

from helpers import ROOT
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.lab.comparison import scores, statistics
from relpos_fairseq.lab.comparison.scores import METRICS, pack
from relpos_fairseq.lab.comparison.summary import alike, by_length

EXACT = METRICS["exact match"]


@pytest.mark.parametrize("words", [0, 3, 12])
def test_bleu_and_chrf_are_sacrebleus(words):
    """Of whole sets and of resamples; with few words there are no 4-grams, and smoothing speaks."""
    generator = np.random.default_rng(words)

    def sentence():
        return " ".join(generator.choice(list("abcde"), 2 + generator.integers(words + 1)))

    system, reference = ([sentence() for _ in range(20)] for _ in range(2))
    found = scores.of_translations(system, reference, BLEU(tokenize="none", force=True))
    for metric, theirs in (("BLEU", BLEU(tokenize="none", force=True)), ("chrF", CHRF())):
        for chosen in (range(20), [3], [1, 1, 7, 7, 9]):
            expected = theirs.corpus_score([system[n] for n in chosen], [[reference[n] for n in chosen]])
            value = METRICS[metric].value(found[metric][list(chosen)].sum(0))
            assert value == pytest.approx(expected.score, abs=1e-9)
    weights = np.zeros((1, 20))
    weights[0, [1, 7, 9]] = 2, 2, 1
    drawn = statistics.draws_of(METRICS["BLEU"], found["BLEU"][None].astype(float), weights)
    assert drawn.item() == pytest.approx(METRICS["BLEU"].value(found["BLEU"][[1, 1, 7, 7, 9]].sum(0)))


def test_other_metrics():
    generator = np.random.default_rng(1)
    true, found = generator.integers(0, 2, (2, 50))
    rows = np.stack([true & found, found, true], 1)
    assert METRICS["F1"].value(rows.sum(0)) == pytest.approx(100 * f1_score(true, found))
    rows = np.stack([found, true, true & found, np.ones_like(true)], 1)
    expected = 100 * matthews_corrcoef(true, found)
    assert METRICS["Matthews"].value(rows.sum(0)) == pytest.approx(expected)
    x, y = generator.standard_normal((2, 50))
    rows = np.stack([x, y, x * x, y * y, x * y, np.ones(50)], 1)
    assert METRICS["Pearson"].value(rows.sum(0)) == pytest.approx(100 * pearsonr(x, y)[0])
    assert METRICS["perplexity"].value(np.array([2 * np.log(7), 2])) == pytest.approx(7)


def test_statistics_survive_packing():
    generator = np.random.default_rng(1)
    for array in (generator.integers(0, 2, (30, 2)), generator.integers(-5, 40000, 9)):
        assert (scores.unpack(scores.pack(array)) == array).all()
    values = generator.standard_normal((4, 3))
    assert scores.unpack(scores.pack(values)) == pytest.approx(values, rel=1e-6)


def test_sign_flips_are_counted():
    differences = np.array([0.3, -0.1, 0.5, 0.2, 0.4])
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((-1, 1), repeat=5)]
    expected = np.mean([one >= 1.3 - 1e-12 for one in sums])
    assert statistics.sign_flip(differences) == pytest.approx(expected)
    assert statistics.sign_flip(np.ones(6)) == 2 / 64 == statistics.smallest_p(6)
    assert statistics.sign_flip(np.zeros(6)) == 1
    assert statistics.sign_flip(np.ones(20)) < 1e-3
    assert statistics.sign_flip(np.array([1.0, np.nan, 1.0])) == 1  # a run that diverged has no score


def test_holm():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.6]) == [1, 1]


def simulated(generator, seeds: int, examples: int, of_seeds: float, shift: float):
    """Return two schemes' (S, N, 2) exact matches: shared examples are hard, and seeds differ."""
    hardness = generator.normal(0, 1, examples)
    levels = generator.normal(0, of_seeds, (2, seeds, 1)) + np.array([shift, 0])[:, None, None]
    right = hardness + levels + generator.normal(0, 1, (2, seeds, examples)) > 0
    return np.stack([right, np.ones_like(right)], -1).astype(float)


def truth(of_seeds: float, shift: float) -> float:
    """Return the expected share of right answers, in per cent."""
    from scipy.stats import norm

    return 100 * norm.cdf(shift / np.sqrt(2 + of_seeds**2))


@pytest.mark.parametrize("of_seeds", [0.05, 0.5])
def test_by_simulation(of_seeds):
    """Intervals cover the truth; without a difference at most 5 % of the tests find one."""
    generator = np.random.default_rng(7)
    rounds, shift, seeds = 300, 0.4, 6
    value = truth(of_seeds, shift)
    covered = covered_difference = false = found = 0
    for _ in range(rounds):
        weights = statistics.resample(60, 200, generator)
        for true in (shift, 0.0):
            rows = simulated(generator, seeds, 60, of_seeds, true)
            whole = EXACT.value(rows.sum(2))
            drawn = np.stack([statistics.draws_of(EXACT, one, weights) for one in rows])
            difference = whole[0] - whole[1]
            p = statistics.sign_flip(difference)
            if not true:
                false += p <= 0.05
                continue
            found += p <= 0.05
            one = statistics.interval(whole[0], drawn[0], generator)
            covered += one.low <= value <= one.high
            two = statistics.interval(difference, drawn[0] - drawn[1], generator)
            covered_difference += two.low <= value - 50 <= two.high
    assert 0.93 <= covered / rounds and 0.93 <= covered_difference / rounds
    assert false / rounds <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / rounds)
    assert found / rounds > (0.1 if of_seeds > 0.1 else 0.5)


@pytest.mark.parametrize("seeds", [3, 6, 9])
def test_a_further_seed_lies_where_it_is_said_to(seeds):
    """Of normal scores 95 % do."""
    drawn = np.random.default_rng(seeds).normal(50, 10, (2000, seeds + 1))
    inside = [one.low <= row[-1] <= one.high for row in drawn for one in [statistics.next_seed(row[:-1])]]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)
    assert statistics.next_seed(np.array([3.0])).high == np.inf


def test_seeds_that_agree_do_not_fix_the_next():
    """One example in one seed is the least deviation; measured scores have no such step."""
    whole = np.full(9, 100.0)
    further = statistics.next_seed(whole, step=5.0)
    assert 100 - further.low == pytest.approx(2.306 * 5 / 3 * np.sqrt(10 / 9), rel=1e-3)
    alone = statistics.interval(whole, np.full((9, 50), 100.0), np.random.default_rng(0), step=5.0)
    assert 100 - alone.low == pytest.approx(2.306 * 5 / 9, rel=1e-3)
    flat = statistics.interval(whole, whole[:, None], np.random.default_rng(0))
    assert statistics.next_seed(whole).low == flat.low == 100


def test_every_bounded_score_has_a_step():
    """What one example may change; perplexity has no largest value, and no two seeds of it agree."""
    steps = {name: metric.step(50) for name, metric in METRICS.items()}
    assert steps.pop("perplexity") == 0
    assert steps == {name: 4.0 if METRICS[name].limits[0] else 2.0 for name in steps}


def test_intervals_hold_of_seeds_that_were_left_out():
    """On the committed exact matches, most of which lie at 0 or 100; the whole table: examples/comparison/README.md."""
    path = ROOT / "examples" / "comparison" / "coverage.py"
    module = runpy.run_path(str(path))
    some = [one for one in module["cells"](path.parent) if one[0].name == "exact match" and len(one[1]) == 6]
    assert len(some) >= 40
    found = module["coverage"](some)
    printed = "a further seed: t, at least one example (reports)"
    for place in ("near 0 or 100", "partly near", "between"):
        assert found[printed, place][1] >= 92, (place, found[printed, place])
    assert found["a further seed: the interval of the mean", "near 0 or 100"][1] < 90


def test_intervals_end_where_scores_do():
    exact, perplexity = scores.METRICS["exact match"], scores.METRICS["perplexity"]
    whole = np.array([100.0, 100.0, 40.0])
    wide = statistics.interval(whole, np.repeat(whole[:, None], 50, 1), np.random.default_rng(0))
    assert wide.high > 100 and wide.low < 0
    assert wide.within(*exact.limits) == statistics.Estimate(80.0, 0.0, 100.0)
    assert wide.within(*perplexity.limits) == statistics.Estimate(80.0, 1.0, wide.high)


@pytest.mark.parametrize(("seeds", "middle"), [(8, np.median), (6, np.mean)])
def test_what_could_be_found_is_found_so_often(seeds, middle):
    """A true difference as large as `detectable` says is found with a power of about 80 %; of six seeds by all."""
    generator = np.random.default_rng(3)
    needed = middle([statistics.detectable(generator.normal(0, 1, seeds), 1) for _ in range(500)])
    found = [statistics.sign_flip(generator.normal(needed, 1, seeds)) <= 0.05 for _ in range(500)]
    assert 0.7 < np.mean(found) < 0.9
    assert statistics.detectable(np.array([1.0]), 1) == float("inf")
    several = generator.normal(0, 1, 8)
    assert statistics.detectable(10 * several, 1) == pytest.approx(10 * statistics.detectable(several, 1))


@pytest.mark.parametrize(("seeds", "comparisons"), [(2, 1), (5, 1), (6, 2), (7, 4)])
def test_nothing_can_be_found_where_no_p_survives(seeds, comparisons):
    differences = np.linspace(0.9, 1.1, seeds)
    assert statistics.sign_flip(differences) * comparisons > 0.05
    assert statistics.detectable(differences, comparisons) == float("inf")


def test_within_a_seed():
    whole = np.array([1.0, -1.0, 0.1])
    drawn = whole[:, None] + np.linspace(-0.5, 0.5, 101)
    assert statistics.within(whole, drawn) == (1, 1)
    few, more = (np.repeat([[-1.0, 1.0]], [below, 100 - below], axis=1) for below in (2, 3))  # p .04 and .06
    assert statistics.within(np.ones(1), few) == (1, 0) and statistics.within(np.ones(1), more) == (0, 0)


def test_runs_of_one_test_set_have_equally_many_examples():
    """One that has not is named."""
    packed = {title: {"statistics": {"BLEU": pack(np.ones((n, 10)))}} for title, n in (("a", 3), ("b", 2))}
    with pytest.raises(UserError, match="b has BLEU of 2 examples, others of 3"):
        alike(packed, METRICS["BLEU"], None)


def test_scores_by_length():
    """Of all sets together, the mean over seeds; a length is drawn where its examples are."""

    def result(*rights: list[int]) -> dict:
        sets = {
            name: {"lengths": pack(lengths), "statistics": {"accuracy": pack(np.stack([right, right**0], 1))}}
            for name, lengths, right in zip(("test", "long"), ([2, 2, 5], [5, 9]), map(np.array, rights), strict=True)
        }
        return {"sets": sets}

    results = [result([1, 0, 1], [0, 1]), result([1, 1, 1], [1, 0])]
    assert by_length(results, ("test", "long")) == [(2.0, 75.0), (5.0, 75.0), (9.0, 50.0)]
