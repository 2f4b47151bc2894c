"""Abstract syntax: the trees that both languages are spoken from."""

from __future__ import annotations

from dataclasses import dataclass

from .lexicon import NOUNS, VERBS, Noun, Verb
from .words import PRONOUNS

DEFINITE = ("the", "this", "my", "his")
PAST = ("past", "perfect")


@dataclass(frozen=True)
class Relative:
    """A relative clause.

    Attributes:
        clause: the clause; the noun phrase that the pronoun stands for is a gap in it.
        role: what the pronoun is in the clause: ``subject``, ``object`` or ``place``.
    """

    clause: Clause
    role: str


@dataclass(frozen=True)
class NP:
    """A noun phrase: a noun, a pronoun, a pair of noun phrases, or (with neither) a gap.

    Attributes:
        noun: the head.
        pronoun: English subject form of a pronoun.
        det: English determiner in the singular (``the``, ``a``, ``this``, ``my``, ``his``, ``no``)
            or ``two``, ``many``, ``any``.
        plural: whether the head is plural.
        adjectives: English adjectives.
        relative: the relative clause after the noun.
        conjunct: a second noun phrase, joined with "and".
    """

    noun: Noun | None = None
    pronoun: str = ""
    det: str = "the"
    plural: bool = False
    adjectives: tuple[str, ...] = ()
    relative: Relative | None = None
    conjunct: NP | None = None

    @property
    def plural_agreement(self) -> bool:
        """Whether a verb agrees with the phrase in the plural."""
        return self.plural or self.pronoun in ("we", "they") or self.conjunct is not None

    @property
    def definite(self) -> bool:
        """Whether the phrase is definite, which decides its place in the German clause."""
        return self.det in DEFINITE

    @property
    def heavy(self) -> bool:
        """Whether a clause stands at the end of the phrase."""
        return self.relative is not None


@dataclass(frozen=True)
class PP:
    """A prepositional phrase: an English preposition and its noun phrase."""

    preposition: str
    np: NP


@dataclass(frozen=True)
class Clause:
    """A clause without a word order.

    Attributes:
        subject: the subject.
        verb: the verb.
        tense: ``present``, ``past``, ``perfect``, ``future`` or a modal.
        negated: whether the clause is negated.
        obj: direct object; in the dative for verbs of the frame ``dative``.
        recipient: indirect object.
        recipient_last: whether English says "to" and the recipient after the object.
        predicate: English adjective after the copula.
        place: place or direction.
        manner: English adverb, or a phrase with "with" or "without".
        time: English adverb of time.
        front: ``time`` or ``place`` where that part opens the clause, else empty.
        complementizer: what opens the complement clause.
        complement: complement clauses, joined with "and".
    """

    subject: NP
    verb: Verb
    tense: str = "present"
    negated: bool = False
    obj: NP | None = None
    recipient: NP | None = None
    recipient_last: bool = False
    predicate: str = ""
    place: PP | None = None
    manner: str | PP = ""
    time: str = ""
    front: str = ""
    complementizer: str = ""
    complement: tuple[Clause, ...] = ()


@dataclass(frozen=True)
class Sentence:
    """A sentence.

    Attributes:
        main: the main clause.
        question: empty for a statement; ``whether`` for a yes-no question; or the English
            question word (``who``, ``what``, ``where``, ``when``, ``why``).
        conjunction: what opens the adverbial clause.
        adverbial: the adverbial clause.
        adverbial_first: whether that clause opens the sentence.
        coordinator: ``and`` or ``but`` before a second sentence.
        second: the second sentence.
    """

    main: Clause
    question: str = ""
    conjunction: str = ""
    adverbial: Clause | None = None
    adverbial_first: bool = False
    coordinator: str = ""
    second: Sentence | None = None


def np(
    head: str,
    det: str = "the",
    *adjectives: str,
    plural: bool = False,
    relative: Relative | None = None,
    conjunct: NP | None = None,
) -> NP:
    """Builds a noun phrase from English words.

    Args:
        head: English singular noun, or the subject form of a pronoun.
        det: English determiner.
        *adjectives: English adjectives.
        plural: whether the noun is plural.
        relative: relative clause.
        conjunct: a second noun phrase.

    Returns:
        The noun phrase.
    """
    if head in PRONOUNS:
        return NP(pronoun=head)
    return NP(NOUNS[head], "", det, plural, adjectives, relative, conjunct)


def clause(subject: NP, verb: str, **features: object) -> Clause:
    """Builds a clause from a subject, the name of a verb ("pick up") and other features."""
    return Clause(subject, VERBS[verb], **features)  # type: ignore[arg-type]
