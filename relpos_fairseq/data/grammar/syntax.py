"""Abstract syntax: the trees that both languages are spoken from."""

from __future__ import annotations

from dataclasses import dataclass

from .lexicon import NOUNS, VERBS, Noun, Verb
from .words import PRONOUNS

DEFINITE = ("the", "this", "my", "his")
PAST = ("past", "perfect")


@dataclass(frozen=True)
class Relative:
    """A relative clause."""

    clause: Clause  # the clause; the noun phrase that the pronoun stands for is a gap in it
    role: str  # what the pronoun is in the clause: ``subject``, ``object`` or ``place``


@dataclass(frozen=True)
class NP:
    """A noun phrase: a noun, a pronoun, a pair of noun phrases, or (with neither) a gap."""

    noun: Noun | None = None  # the head
    pronoun: str = ""  # English subject form of a pronoun
    # English determiner in the singular (``the``, ``a``, ``this``, ``my``, ``his``, ``no``) or
    # ``two``, ``many``, ``any``
    det: str = "the"
    plural: bool = False  # whether the head is plural
    adjectives: tuple[str, ...] = ()  # English adjectives
    relative: Relative | None = None  # the relative clause after the noun
    conjunct: NP | None = None  # a second noun phrase, joined with "and"

    @property
    def plural_agreement(self) -> bool:
        """Whether a verb agrees with the phrase in the plural."""
        return self.plural or self.pronoun in ("we", "they") or self.conjunct is not None

    @property
    def definite(self) -> bool:
        """Whether the phrase is definite, which decides its place in the German clause."""
        return self.det in DEFINITE


@dataclass(frozen=True)
class PP:
    """A prepositional phrase: an English preposition and its noun phrase."""

    preposition: str
    np: NP


@dataclass(frozen=True)
class Clause:
    """A clause without a word order."""

    subject: NP
    verb: Verb
    tense: str = "present"  # ``present``, ``past``, ``perfect``, ``future`` or a modal
    negated: bool = False  # whether the clause is negated
    obj: NP | None = None  # direct object; in the dative for verbs of the frame ``dative``
    recipient: NP | None = None  # indirect object
    recipient_last: bool = False  # whether English says "to" and the recipient after the object
    predicate: str = ""  # English adjective after the copula
    place: PP | None = None  # place or direction
    manner: str | PP = ""  # English adverb, or a phrase with "with" or "without"
    time: str = ""  # English adverb of time
    front: str = ""  # ``time`` or ``place`` where that part opens the clause, else empty
    complementizer: str = ""  # what opens the complement clause
    complement: tuple[Clause, ...] = ()  # complement clauses, joined with "and"


@dataclass(frozen=True)
class Sentence:
    """A sentence."""

    main: Clause  # the main clause
    # empty for a statement; ``whether`` for a yes-no question; or the English question word
    # (``who``, ``what``, ``where``, ``when``, ``why``)
    question: str = ""
    conjunction: str = ""  # what opens the adverbial clause
    adverbial: Clause | None = None  # the adverbial clause
    adverbial_first: bool = False  # whether that clause opens the sentence
    coordinator: str = ""  # ``and`` or ``but`` before a second sentence
    second: Sentence | None = None  # the second sentence


def np(
    head: str,
    det: str = "the",
    *adjectives: str,
    plural: bool = False,
    relative: Relative | None = None,
    conjunct: NP | None = None,
) -> NP:
    """Builds a noun phrase from English words: a singular noun, or a pronoun's subject form."""
    if head in PRONOUNS:
        return NP(pronoun=head)
    return NP(NOUNS[head], "", det, plural, adjectives, relative, conjunct)


def clause(subject: NP, verb: str, **features: object) -> Clause:
    """Builds a clause from a subject, the name of a verb ("pick up") and other features."""
    return Clause(subject, VERBS[verb], **features)  # type: ignore[arg-type]
