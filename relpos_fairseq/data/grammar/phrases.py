"""Random phrases of the grammar, and clauses without other clauses in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from .lexicon import NOUNS, VERBS, Verb
from .syntax import DEFINITE, NP, PAST, PP, Clause
from .words import ADJECTIVES_OF, MANNERS, PRONOUNS

_T = TypeVar("_T")

TENSES = (
    ("present", 38),
    ("past", 22),
    ("perfect", 10),
    ("future", 9),
    ("can", 8),
    ("must", 4),
    ("should", 4),
    ("want", 5),
)
FRAMES = (("intrans", 18), ("motion", 10), ("trans", 42), ("dative", 10), ("ditrans", 11), ("copula", 9))
_SINGULAR = (("the", 50), ("a", 18), ("this", 10), ("my", 12), ("his", 10))
_PLURAL = (("the", 50), ("two", 12), ("many", 12), ("this", 8), ("my", 10), ("his", 8))
ANIMATE = ("human", "animal")
_PLACES = {
    "in": ("garden", "house", "kitchen", "school", "park", "city", "forest"),
    "behind": ("house", "school", "door", "table", "window"),
    "in front of": ("house", "school", "door", "table", "window"),
    "into": ("garden", "house", "kitchen", "school", "park", "city", "forest"),
}
_NOUNS_OF = {kind: [noun for noun in NOUNS.values() if noun.kind == kind] for kind in ADJECTIVES_OF}
# Verbs by their frame and by whether the subject is human.
_VERBS_OF = {
    (frame, human): [verb for verb in VERBS.values() if verb.frame == frame and (human or verb.animal_subject)]
    for frame in (*(frame for frame, _ in FRAMES), "clause")
    for human in (True, False)
}


class PhraseSampler:
    """Draws phrases and simple clauses, which depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _chance(self, probability: float) -> bool:
        """Draws yes with a probability."""
        return self._random.random() < probability

    def _pick(self, options: Sequence[_T]) -> _T:
        """Draws one option evenly."""
        return options[int(self._random.random() * len(options))]

    def _weigh(self, options: Sequence[tuple[_T, int]]) -> _T:
        """Draws one option by its weight."""
        mark = self._random.random() * sum(weight for _, weight in options)
        for option, weight in options:
            mark -= weight
            if mark < 0:
                return option
        return options[-1][0]

    def _verb(self, frame: str, kind: str = "human") -> Verb:
        """Draws a verb that a subject of a kind may have."""
        return self._pick(_VERBS_OF[frame, kind == "human"])

    def _noun_phrase(self, kinds: Sequence[str], pronoun: float = 0.0, heads: str = "") -> NP:
        """Draws a noun phrase of some kinds of noun, without clauses.

        ``pronoun`` is the probability of a pronoun; ``heads``: ``definite`` or ``singular`` for
        phrases of that sort only.
        """
        if self._chance(pronoun):
            return NP(pronoun=self._pick(list(PRONOUNS)))
        kind = self._pick(kinds)
        noun = self._pick(_NOUNS_OF[kind])
        plural = heads != "singular" and self._chance(0.28)
        det = self._weigh(_PLURAL if plural else _SINGULAR)
        if heads == "definite" and det not in DEFINITE:
            det = "the"
        count = self._weigh(((0, 64), (1, 31), (2, 5)))
        adjectives: tuple[str, ...] = ()
        while len(adjectives) < count:
            adjective = self._pick(ADJECTIVES_OF[kind])
            if adjective not in adjectives:
                adjectives += (adjective,)
        return NP(noun, "", det, plural, adjectives)

    def _negated(self, clause: Clause, probability: float) -> bool:
        """Draws whether a clause is negated, where the rules allow it."""
        if clause.tense == "must" or clause.subject.det == "no":
            return False
        return self._chance(probability)

    def _simple(self, subject: NP, frame: str, kind: str = "human", light: bool = False) -> Clause:
        """Draws a clause around a subject, without any other clause in it."""
        verb = self._verb(frame, kind)
        clause = Clause(subject, verb, self._weigh(TENSES))
        clause = replace(clause, negated=self._negated(clause, 0.12))
        if frame == "copula":
            clause = replace(clause, predicate=self._pick(ADJECTIVES_OF[kind]))
        if frame in ("trans", "dative", "ditrans"):
            clause = self._with_objects(clause)
        return self._with_adverbials(clause, 0.4 if light else 1.0)

    def _with_objects(self, clause: Clause) -> Clause:
        kinds, ditransitive = clause.verb.objects, clause.verb.frame == "ditrans"
        animate = not ditransitive and "human" in kinds
        obj = self._noun_phrase(kinds, pronoun=0.25 if animate else 0.0)
        if clause.negated and obj.noun is not None and not obj.definite:
            plain = clause.verb.frame != "dative"
            obj = replace(obj, det=("any" if obj.plural else "a") if plain else "the")
        elif obj.noun is not None and obj.definite and not obj.adjectives and self._chance(0.04):
            obj = replace(obj, conjunct=self._noun_phrase((obj.noun.kind,), 0, "definite"))
        if not ditransitive:
            return replace(clause, obj=obj)
        recipient = self._noun_phrase(("human",), 0.3, "definite" if clause.negated else "")
        return replace(clause, obj=obj, recipient=recipient, recipient_last=self._chance(0.3))

    def _with_adverbials(self, clause: Clause, scale: float) -> Clause:
        frame, time, manner, place = clause.verb.frame, "", "", None
        if self._chance(0.34 * scale):
            times = ["today", "often", "every day", "in the evening"]
            times += ["yesterday"] if clause.tense == "past" else []
            times += ["now"] if clause.tense in ("present", "can", "must") else []
            times += ["tomorrow"] if clause.tense not in ("present", *PAST) else []
            time = self._pick(times)
        if frame == "copula":
            return replace(clause, time=time)
        light = clause.obj is None or clause.obj.pronoun or clause.obj.definite
        if light and self._chance(0.22 * scale):
            manner = self._pick(list(MANNERS)) if self._chance(0.7) else self._company()
        if frame == "motion" and self._chance(0.8):
            place = self._place("into")
        elif frame != "ditrans" and self._chance(0.24 * scale):
            place = self._place(self._weigh((("in", 60), ("behind", 20), ("in front of", 20))))
        return replace(clause, time=time, manner=manner, place=place)

    def _company(self) -> PP:
        """Draws a phrase with "with" or "without"."""
        np = self._noun_phrase(ANIMATE, 0.15)
        return PP("with" if self._chance(0.7) else "without", np)

    def _place(self, preposition: str) -> PP:
        """Draws a place or a direction."""
        phrase = self._noun_phrase(("place",), 0.0, "singular")
        noun = NOUNS[self._pick(_PLACES[preposition])]
        adjectives = tuple(a for a in phrase.adjectives[:1] if a in ADJECTIVES_OF[noun.kind])
        return PP(preposition, replace(phrase, noun=noun, adjectives=adjectives))
