"""Random sentences of the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .lexicon import VERBS
from .phrases import ANIMATE, FRAMES, TENSES, PhraseSampler
from .syntax import NP, Clause, Relative, Sentence
from .words import CONJUNCTIONS

_PATTERNS = (("plain", 50), ("complement", 18), ("adverbial", 20), ("question", 12))
_LONG_PATTERNS = (("plain", 10), ("complement", 45), ("adverbial", 45))


class Sampler(PhraseSampler):
    """Draws sentences, which depend on the seed alone; long ones have more and deeper clauses."""

    def __init__(self, seed: int, long: bool = False) -> None:
        super().__init__(seed)
        self._long = long

    def _subject(self, kinds: Sequence[str]) -> NP:
        """Draws a subject, with a relative clause or a second phrase now and then."""
        subject = self._noun_phrase(kinds, pronoun=0.18)
        if subject.noun is None:
            return subject
        if self._chance(0.15):
            return replace(subject, relative=self._relative(subject))
        if self._chance(0.05):
            return replace(subject, det="no", adjectives=())
        if subject.definite and not subject.adjectives and self._chance(0.08):
            return replace(subject, conjunct=self._noun_phrase((subject.noun.kind,), 0, "definite"))
        return subject

    def _relative(self, head: NP) -> Relative:
        """Draws a relative clause after a head."""
        assert head.noun is not None
        kind, gap = head.noun.kind, NP(plural=head.plural)
        if kind == "place" and self._chance(0.5):
            clause = self._simple(self._noun_phrase(("human",), 0.2), "intrans")
            return Relative(replace(clause, place=None, time="", manner=""), "place")
        if kind in ANIMATE and self._chance(0.6):
            frame = self._weigh((("trans", 60), ("intrans", 25), ("dative", 15)))
            clause = self._simple(gap, frame, kind, light=True)
            return Relative(clause, "subject")
        frame = "dative" if kind in ANIMATE and self._chance(0.2) else "trans"
        verbs = [v for v in VERBS.values() if v.frame == frame and kind in v.objects]
        verb = self._pick(verbs)
        subject = self._noun_phrase(ANIMATE if verb.animal_subject else ("human",), 0.25)
        clause = Clause(subject, verb, self._weigh(TENSES), obj=gap)
        return Relative(replace(clause, negated=self._negated(clause, 0.08)), "object")

    def _clause(self, front: bool = False) -> Clause:
        """Draws a clause, perhaps with a relative clause but with no other.

        With ``front`` an adverbial may open it.
        """
        frame = self._weigh(FRAMES)
        kind = "human" if self._chance(0.68) else "animal"
        if frame == "copula" and self._chance(0.4):
            kind = "thing"
        elif kind == "animal" and frame not in ("trans", "dative", "copula"):
            frame = self._weigh((("intrans", 60), ("motion", 40)))
        clause = self._simple(self._subject((kind,)), frame, kind)
        if front and self._chance(0.45):
            if clause.time:
                clause = replace(clause, front="time")
            elif clause.place is not None and clause.place.preposition != "into":
                clause = replace(clause, front="place")
        obj = clause.obj
        if obj is None or obj.noun is None or obj.conjunct or obj.det == "any":
            return clause
        if clause.subject.relative or clause.recipient_last or not self._chance(0.22):
            return clause
        return self._with_heavy_object(clause, obj)

    def _with_heavy_object(self, clause: Clause, obj: NP) -> Clause:
        """Adds a relative clause to the object; nothing of its own clause may then follow."""
        clause = replace(clause, obj=replace(obj, relative=self._relative(obj)), manner="")
        if clause.front != "time":
            clause = replace(clause, time="")
        return clause if clause.front == "place" else replace(clause, place=None)

    def _complement(self, depth: int) -> Clause:
        """Draws a clause with complement clauses, up to a depth."""
        verb = self._verb("clause")
        joined = 2 if self._chance(0.3 if self._long else 0.06) else 1
        clause = Clause(
            self._subject(("human",)),
            verb,
            self._weigh(TENSES[:3]),
            complementizer=self._pick(verb.complements),
            complement=tuple(self._embedded(depth - 1) for _ in range(joined)),
        )
        return replace(clause, negated=self._negated(clause, 0.12))

    def _embedded(self, depth: int) -> Clause:
        """Draws a subordinate clause with complement clauses up to a depth."""
        if depth > 0 and self._chance(0.6 if self._long else 0.2):
            return self._complement(depth)
        return self._clause()

    def _question(self) -> Sentence:
        frame = self._weigh((("trans", 55), ("dative", 20), ("intrans", 25)))
        kinds = ("whether", "whether", "who", "who", "object", "where", "when", "why")
        kind = self._pick(kinds)
        subject = NP() if kind == "who" else self._noun_phrase(("human",), 0.25)
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
        """Draws a sentence; up to ``parts`` more may be coordinated with it."""
        pattern = self._weigh(_LONG_PATTERNS if self._long else _PATTERNS)
        if pattern == "question":
            return self._question()
        if pattern == "complement":
            sentence = Sentence(self._complement(4 if self._long else 2))
        elif pattern == "adverbial":
            sentence = self._adverbial()
        else:
            sentence = Sentence(self._clause(front=True))
        if parts and self._long and self._chance(0.6):
            second = self.sentence(parts - 1)
        elif pattern == "plain" and self._chance(0.15):
            second = Sentence(self._clause(front=True))
        else:
            return sentence
        return replace(sentence, coordinator=self._pick(("and", "but")), second=second)

    def _adverbial(self) -> Sentence:
        conjunction = self._pick((*CONJUNCTIONS, "when"))
        clause = self._embedded(1 if self._long else 0)
        if conjunction == "when" and clause.tense not in ("present", "past"):
            clause = replace(clause, tense="present", time="")
        first = self._chance(0.5)
        return Sentence(self._clause(front=not first), "", conjunction, clause, first)
