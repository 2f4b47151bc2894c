"""Draw sentences of the built-in grammar at random, and collect a parallel corpus of them: the data of the quickstart.

`build` collects distinct pairs in splits that share no sentence; the sentences of `test_long` are longer than any of
`train`.  The corpus depends on the seed and the sizes alone, on every version of Python.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import open_together
from relpos_fairseq.io.progress import table
from relpos_fairseq.lab.toy.grammar import (
    ADJECTIVES_OF,
    CONJUNCTIONS,
    DEFINITE,
    MANNERS,
    NOUNS,
    NP,
    PAST,
    PP,
    PRONOUNS,
    VERBS,
    Clause,
    Relative,
    Sentence,
    Verb,
    translate,
)

_T = TypeVar("_T")
Pair = tuple[str, str]
Corpus = dict[str, list[Pair]]

MAX_TOKENS = 24  # of a sentence of train, valid and test, on either side
MAX_TOKENS_LONG = 48
_PAIRS_PER_WORD = 2400  # a word of a held-out sentence occurs in training once per so many pairs, or more often
_MAX_DRAWS_PER_PAIR = 400
SOURCES = [Path(__file__).with_name("grammar.py"), Path(__file__)]  # what the sentences depend on


class GrammarError(UserError):
    """The grammar cannot give as many sentences as were asked for."""


# Random sentences


def _weights(text: str) -> list[tuple[str, int]]:
    """Read options with their weights."""
    entries = (entry.split() for entry in text.split(","))
    return [(name, int(weight)) for name, weight in entries]


_TENSES = _weights("present 38, past 22, perfect 10, future 9, can 8, must 4, should 4, want 5")
_FRAMES = _weights("intrans 18, motion 10, trans 42, dative 10, ditrans 11, copula 9")
_SINGULAR = _weights("the 50, a 18, this 10, my 12, his 10")
_PLURAL = _weights("the 50, two 12, many 12, this 8, my 10, his 8")
_PATTERNS = _weights("plain 50, complement 18, adverbial 20, question 12")
_LONG_PATTERNS = _weights("plain 10, complement 45, adverbial 45")
_HUMAN, _ANIMATE = ("human",), ("human", "animal")
_ROOMS, _LANDMARKS = "garden house kitchen school park city forest".split(), "house school door table window".split()
_PLACES = {"in": _ROOMS, "into": _ROOMS, "behind": _LANDMARKS, "in front of": _LANDMARKS}


class Sampler:
    """Draw sentences, which depend on the seed alone; `long` ones have more and deeper clauses."""

    def __init__(self, seed: int, long: bool = False) -> None:
        self._random = random.Random(seed)
        self._long = long

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _pick(self, options: Sequence[_T]) -> _T:
        return options[int(self._random.random() * len(options))]

    def _weigh(self, options: Sequence[tuple[_T, int]]) -> _T:
        """Draw an option with the probability of its weight."""
        mark = self._random.random() * sum(weight for _, weight in options)
        for option, weight in options:
            mark -= weight
            if mark < 0:
                return option
        return options[-1][0]

    def _verb(self, frame: str, human: bool = True) -> Verb:
        return self._pick([one for one in VERBS.values() if one.frame == frame and (human or one.animal_subject)])

    def _np(self, kinds: Sequence[str], pronoun: float = 0.0, heads: str = "") -> NP:
        """Draw a noun phrase without clauses.

        Args:
            kinds: of noun, to choose from.
            pronoun: probability of a pronoun.
            heads: "definite" or "singular" for such phrases only.
        """
        if self._chance(pronoun):
            return NP(pronoun=self._pick(list(PRONOUNS)))
        kind = self._pick(kinds)
        noun = self._pick([one for one in NOUNS.values() if one.kind == kind])
        plural = heads != "singular" and self._chance(0.28)
        det = self._weigh(_PLURAL if plural else _SINGULAR)
        if heads == "definite" and det not in DEFINITE:
            det = "the"
        count = self._weigh(((0, 64), (1, 31), (2, 5)))
        adjectives: tuple[str, ...] = ()
        while len(adjectives) < count:
            adjective = self._pick(ADJECTIVES_OF[kind])
            adjectives += (adjective,) * (adjective not in adjectives)
        return NP(noun, "", det, plural, adjectives)

    def _negate(self, clause: Clause, probability: float) -> Clause:
        allowed = clause.tense != "must" and clause.subject.det != "no"
        return replace(clause, negated=allowed and self._chance(probability))

    def _simple(self, subject: NP, frame: str, kind: str = "human", light: bool = False) -> Clause:
        """Draw a clause around a subject, without any other clause in it; `light`: with fewer adverbials."""
        clause = self._negate(Clause(subject, self._verb(frame, kind == "human"), self._weigh(_TENSES)), 0.12)
        if frame == "copula":
            clause = replace(clause, predicate=self._pick(ADJECTIVES_OF[kind]))
        if frame in ("trans", "dative", "ditrans"):
            clause = self._add_objects(clause)
        return self._add_adverbials(clause, 0.4 if light else 1.0)

    def _add_objects(self, clause: Clause) -> Clause:
        kinds, frame = clause.verb.objects, clause.verb.frame
        obj = self._np(kinds, pronoun=0.25 if frame != "ditrans" and "human" in kinds else 0.0)
        if clause.negated and obj.noun is not None and not obj.definite:
            obj = replace(obj, det="the" if frame == "dative" else "any" if obj.plural else "a")
        elif obj.noun is not None and obj.definite and not obj.adjectives and self._chance(0.04):
            obj = replace(obj, conjunct=self._np((obj.noun.kind,), 0, "definite"))
        if frame != "ditrans":
            return replace(clause, obj=obj)
        recipient = self._np(_HUMAN, 0.3, "definite" if clause.negated else "")
        return replace(clause, obj=obj, recipient=recipient, recipient_last=self._chance(0.3))

    def _add_adverbials(self, clause: Clause, scale: float) -> Clause:
        frame, time = clause.verb.frame, ""
        manner: str | PP = ""
        place: PP | None = None
        if self._chance(0.34 * scale):
            times = ["today", "often", "every day", "in the evening"]
            times += ["yesterday"] if clause.tense == "past" else []
            times += ["now"] if clause.tense in ("present", "can", "must") else []
            times += ["tomorrow"] if clause.tense not in ("present", *PAST) else []
            time = self._pick(times)
        if frame == "copula":
            return replace(clause, time=time)
        if (clause.obj is None or clause.obj.pronoun or clause.obj.definite) and self._chance(0.22 * scale):
            manner = self._pick(list(MANNERS)) if self._chance(0.7) else self._company()
        if frame == "motion" and self._chance(0.8):
            place = self._place("into")
        elif frame != "ditrans" and self._chance(0.24 * scale):
            place = self._place(self._weigh((("in", 60), ("behind", 20), ("in front of", 20))))
        return replace(clause, time=time, manner=manner, place=place)

    def _company(self) -> PP:
        phrase = self._np(_ANIMATE, 0.15)
        return PP("with" if self._chance(0.7) else "without", phrase)

    def _place(self, preposition: str) -> PP:
        phrase = self._np(("place",), 0.0, "singular")
        noun = NOUNS[self._pick(_PLACES[preposition])]
        adjectives = tuple(one for one in phrase.adjectives[:1] if one in ADJECTIVES_OF[noun.kind])
        return PP(preposition, replace(phrase, noun=noun, adjectives=adjectives))

    def _subject(self, kind: str) -> NP:
        """Draw a subject, with a relative clause or a second phrase now and then."""
        subject = self._np((kind,), pronoun=0.18)
        if subject.noun is None:
            return subject
        if self._chance(0.15):
            return replace(subject, relative=self._relative(kind, subject.plural))
        if self._chance(0.05):
            return replace(subject, det="no", adjectives=())
        if subject.definite and not subject.adjectives and self._chance(0.08):
            return replace(subject, conjunct=self._np((kind,), 0, "definite"))
        return subject

    def _relative(self, kind: str, plural: bool) -> Relative:
        """Draw a relative clause of a noun of a kind."""
        gap = NP(plural=plural)
        if kind == "place" and self._chance(0.5):
            clause = self._simple(self._np(_HUMAN, 0.2), "intrans")
            return Relative(replace(clause, place=None, time="", manner=""), "place")
        if kind in _ANIMATE and self._chance(0.6):
            frame = self._weigh((("trans", 60), ("intrans", 25), ("dative", 15)))
            return Relative(self._simple(gap, frame, kind, light=True), "subject")
        frame = "dative" if kind in _ANIMATE and self._chance(0.2) else "trans"
        verb = self._pick([one for one in VERBS.values() if one.frame == frame and kind in one.objects])
        subject = self._np(_ANIMATE if verb.animal_subject else _HUMAN, 0.25)
        return Relative(self._negate(Clause(subject, verb, self._weigh(_TENSES), obj=gap), 0.08), "object")

    def _clause(self, front: bool = False) -> Clause:
        """Draw a clause with no other clause than relative ones; `front`: an adverbial may open it."""
        frame = self._weigh(_FRAMES)
        kind = "human" if self._chance(0.68) else "animal"
        if frame == "copula" and self._chance(0.4):
            kind = "thing"
        elif kind == "animal" and frame not in ("trans", "dative", "copula"):
            frame = self._weigh((("intrans", 60), ("motion", 40)))
        clause = self._simple(self._subject(kind), frame, kind)
        if front and self._chance(0.45):
            movable = clause.place is not None and clause.place.preposition != "into"
            clause = replace(clause, front="time" if clause.time else "place" if movable else "")
        obj = clause.obj
        if obj is None or obj.noun is None or obj.conjunct or obj.det == "any":
            return clause
        if clause.subject.relative or clause.recipient_last or not self._chance(0.22):
            return clause
        # A relative clause of the object, which nothing of the clause itself may then follow.
        clause = replace(clause, obj=replace(obj, relative=self._relative(obj.noun.kind, obj.plural)), manner="")
        clause = clause if clause.front == "time" else replace(clause, time="")
        return clause if clause.front == "place" else replace(clause, place=None)

    def _complement(self, depth: int) -> Clause:
        """Draw a clause with complement clauses, which are nested up to a depth."""
        verb = self._verb("clause")
        joined = 2 if self._chance(0.3 if self._long else 0.06) else 1
        clause = Clause(self._subject("human"), verb, self._weigh(_TENSES[:3]))
        clause = replace(clause, complementizer=self._pick(verb.complements))
        clause = replace(clause, complement=tuple(self._embedded(depth - 1) for _ in range(joined)))
        return self._negate(clause, 0.12)

    def _embedded(self, depth: int) -> Clause:
        if depth > 0 and self._chance(0.6 if self._long else 0.2):
            return self._complement(depth)
        return self._clause()

    def _adverbial(self) -> Sentence:
        conjunction = self._pick((*CONJUNCTIONS, "when"))
        clause = self._embedded(1 if self._long else 0)
        if conjunction == "when" and clause.tense not in ("present", "past"):
            clause = replace(clause, tense="present", time="")
        first = self._chance(0.5)
        return Sentence(self._clause(front=not first), "", conjunction, clause, first)

    def _question(self) -> Sentence:
        frame = self._weigh((("trans", 55), ("dative", 20), ("intrans", 25)))
        kind = self._pick(("whether", "whether", "who", "who", "object", "where", "when", "why"))
        subject = NP() if kind == "who" else self._np(_HUMAN, 0.25)
        clause = replace(self._simple(subject, frame), negated=False)
        obj = clause.obj
        if obj is not None and obj.det == "any":
            clause = replace(clause, obj=replace(obj, det="the"))
        if kind == "when":
            clause = replace(clause, time="")
        elif kind == "where":
            clause = replace(clause, place=None)
        elif kind == "object" and obj is None:
            kind = "whether"
        elif kind == "object":
            kind = "who" if "human" in clause.verb.objects else "what"
            clause = replace(clause, obj=NP())
        return Sentence(clause, kind)

    def sentence(self, parts: int = 2) -> Sentence:
        """Draw a sentence; up to `parts` more may be coordinated with it."""
        pattern = self._weigh(_LONG_PATTERNS if self._long else _PATTERNS)
        if pattern == "question":
            return self._question()
        if pattern == "complement":
            sentence = Sentence(self._complement(4 if self._long else 2))
        else:
            sentence = self._adverbial() if pattern == "adverbial" else Sentence(self._clause(front=True))
        if parts and self._long and self._chance(0.6):
            second = self.sentence(parts - 1)
        elif pattern == "plain" and self._chance(0.15):
            second = Sentence(self._clause(front=True))
        else:
            return sentence
        return replace(sentence, coordinator=self._pick(("and", "but")), second=second)


# The corpus


def build(seed: int = 1, train: int = 24000, valid: int = 500, test: int = 500, test_long: int = 300) -> Corpus:
    """Return as many distinct pairs of every split as asked for; no sentence of either language is in two splits.

    Words of held-out sentences occur in `train`, at least once per 2,400 of its pairs.

    Raises:
        GrammarError: so many pairs cannot be found.
    """
    used: tuple[set[str], set[str]] = (set(), set())

    def collect(number: int, size: int, least: int, most: int, words: set[str] | None) -> list[Pair]:
        """Draw the pairs of one split, of `least` to `most` tokens on either side, of certain words only."""
        pairs: dict[str, str] = {}
        sampler = Sampler(seed * 8 + number, long=least > 1)
        for _ in range(_MAX_DRAWS_PER_PAIR * (size + 10)):
            if len(pairs) == size:
                break
            en, de = translate(sampler.sentence())
            lengths = len(en.split()), len(de.split())
            if min(lengths) < least or max(lengths) > most or en in used[0] or de in used[1]:
                continue
            if words is not None and not words.issuperset(f"{en} {de}".split()):
                continue
            if pairs.setdefault(en, de) != de:
                raise GrammarError(f"two translations of one sentence: {en}")
        if len(pairs) < size:
            raise GrammarError(f"only {len(pairs)} of {size} pairs found; ask for fewer")
        used[0].update(pairs)
        used[1].update(pairs.values())
        return list(pairs.items())

    corpus = {"train": collect(0, train, 1, MAX_TOKENS, None)}
    counts = Counter(word for pair in corpus["train"] for side in pair for word in side.split())
    known = {word for word, count in counts.items() if count >= train // _PAIRS_PER_WORD}
    corpus["valid"] = collect(1, valid, 1, MAX_TOKENS, known)
    corpus["test"] = collect(2, test, 1, MAX_TOKENS, known)
    corpus["test_long"] = collect(3, test_long, MAX_TOKENS + 1, MAX_TOKENS_LONG, known)
    return corpus


def write(corpus: Corpus, directory: Path) -> None:
    """Write a corpus, two files a split, which appear together and whole."""
    sides = [(split, side) for split in corpus for side in (0, 1)]
    with open_together(*(directory / f"{split}.{('en', 'de')[side]}" for split, side in sides)) as files:
        for file, (split, side) in zip(files, sides, strict=True):
            file.write("".join(pair[side] + "\n" for pair in corpus[split]).encode())


def describe(corpus: Corpus) -> str:
    """Return a table of the files of a corpus: pairs, tokens, longest sentence, different words."""
    rows = []
    for split, pairs in corpus.items():
        for side, language in enumerate(("en", "de")):
            sentences = [pair[side].split() for pair in pairs]
            lengths, words = [len(one) for one in sentences], {word for one in sentences for word in one}
            rows.append((f"{split}.{language}", len(pairs), sum(lengths), max(lengths), len(words)))
    return table(rows, ("file", "pairs", "tokens", "longest", "words"))
