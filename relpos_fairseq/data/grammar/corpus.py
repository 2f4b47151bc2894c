"""The parallel corpus: distinct pairs in splits that share no sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from relpos_fairseq.io.files import open_together
from relpos_fairseq.io.progress import table

from . import english, german
from .sampler import Sampler
from .syntax import Sentence

Pair = tuple[str, str]
Corpus = dict[str, list[Pair]]

MAX_TOKENS = 24
MAX_TOKENS_LONG = 48
# A word of a held-out sentence occurs in training once per so many training pairs, or more often.
_PAIRS_PER_WORD = 2400
_MAX_DRAWS_PER_PAIR = 400


class GrammarError(ValueError):
    """The grammar cannot give what was asked for."""


def translate(sentence: Sentence) -> Pair:
    """Speaks a sentence in English and in German, tokens separated by single spaces."""
    return " ".join(english.sentence_words(sentence)), " ".join(german.sentence_words(sentence))


class _Collector:
    """Collects pairs; no English and no German sentence gets into two splits."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._used: tuple[set[str], set[str]] = (set(), set())

    def _draw(self, number: int, long: bool, size: int) -> Iterable[Pair]:
        """Draws pairs for one split until there have been far too many."""
        sampler = Sampler(self._seed * 8 + number, long)
        for _ in range(_MAX_DRAWS_PER_PAIR * (size + 10)):
            yield translate(sampler.sentence())

    def split(self, number: int, size: int, least: int, most: int, words: Counter[str]) -> list[Pair]:
        """Collects one split, of ``least`` to ``most`` tokens on either side.

        Args:
            number: number of the split; each has its own stream of random numbers.
            size: how many pairs to collect.
            least: least tokens of either side.
            most: most tokens of either side.
            words: words that may occur; empty for any.

        Raises:
            GrammarError: if so many pairs could not be found.
        """
        pairs: dict[str, str] = {}
        for en, de in self._draw(number, least > 1, size):
            if len(pairs) == size:
                break
            en_words, de_words = en.split(), de.split()
            lengths = (len(en_words), len(de_words))
            if min(lengths) < least or max(lengths) > most:
                continue
            if en in self._used[0] or de in self._used[1]:
                continue
            if words and not all(word in words for word in en_words + de_words):
                continue
            if pairs.setdefault(en, de) != de:
                raise GrammarError(f"two translations of one sentence: {en}")
        if len(pairs) < size:
            raise GrammarError(f"only {len(pairs)} of {size} pairs found; ask for fewer")
        self._used[0].update(pairs)
        self._used[1].update(pairs.values())
        return list(pairs.items())


def build(seed: int = 1, train: int = 24000, valid: int = 500, test: int = 500, test_long: int = 300) -> Corpus:
    """Builds the corpus, which depends on the seed and on the splits' numbers of pairs only.

    The sentences of ``test_long`` are longer, on both sides, than any of ``train``.
    """
    collector = _Collector(seed)
    corpus = {"train": collector.split(0, train, 1, MAX_TOKENS, Counter())}
    counts = Counter(word for pair in corpus["train"] for side in pair for word in side.split())
    least = max(1, train // _PAIRS_PER_WORD)
    known = Counter({word: count for word, count in counts.items() if count >= least})
    corpus["valid"] = collector.split(1, valid, 1, MAX_TOKENS, known)
    corpus["test"] = collector.split(2, test, 1, MAX_TOKENS, known)
    corpus["test_long"] = collector.split(3, test_long, MAX_TOKENS + 1, MAX_TOKENS_LONG, known)
    return corpus


def write(corpus: Corpus, directory: Path) -> None:
    """Writes a corpus, two files a split, which appear together and whole."""
    paths = {
        directory / f"{split}.{language}": [pair[side] for pair in pairs]
        for split, pairs in corpus.items()
        for side, language in enumerate(("en", "de"))
    }
    with open_together(*paths) as files:
        for file, lines in zip(files, paths.values(), strict=True):
            file.write("".join(line + "\n" for line in lines).encode())


def describe(corpus: Corpus) -> str:
    """Return a table of the files of a corpus: pairs, tokens, longest sentence, different words."""
    rows = []
    for split, pairs in corpus.items():
        for side, language in enumerate(("en", "de")):
            sentences = [pair[side].split() for pair in pairs]
            lengths = [len(sentence) for sentence in sentences]
            words = {word for sentence in sentences for word in sentence}
            rows.append((f"{split}.{language}", len(pairs), sum(lengths), max(lengths), len(words)))
    return table(rows, ("file", "pairs", "tokens", "longest", "words"))
