"""German: from trees to words, with agreement, case and word order."""

from __future__ import annotations

from .lexicon import Noun
from .syntax import NP, PAST, PP, Clause, Relative, Sentence
from .words import (
    ADJECTIVES,
    COMPLEMENTIZERS,
    CONJUNCTIONS,
    COORDINATORS,
    MANNERS,
    MODALS,
    PREPOSITIONS,
    PRONOUNS,
    TIMES,
)

_CASES = ("nom", "acc", "dat")
# Endings by case, for masculine, feminine, neuter and plural.
_DER = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den"}
_DIESER = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}
_EIN = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}
_WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}
_MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}
_STRONG = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}
_EIN_WORDS = {"a": "ein", "no": "kein", "any": "kein", "my": "mein", "his": "sein"}
_QUESTION_WORDS = {"where": "wo", "when": "wann", "why": "warum", "what": "was"}
_WHO = {"nom": "wer", "acc": "wen", "dat": "wem"}
_CONTRACTIONS = {("in", "dem"): "im", ("in", "das"): "ins"}


def _ending(table: dict[str, str], case: str, gender: str, plural: bool) -> str:
    """Looks up an ending; an empty one is written ``-`` in the tables."""
    column = 3 if plural else "mfn".index(gender)
    return table[case].split()[column].strip("-")


def _noun(noun: Noun, case: str, plural: bool) -> str:
    if not plural:
        return noun.de_plural if noun.weak and case != "nom" else noun.de
    return noun.de_plural + "n" * (case == "dat" and noun.de_plural[-1] not in "ns")


def _determiner(det: str, case: str, gender: str, plural: bool) -> tuple[str, dict[str, str]]:
    """Inflects a determiner, and names the endings of the adjectives after it."""
    if det == "the":
        return _ending(_DER, case, gender, plural), _WEAK
    if det == "this":
        return "dies" + _ending(_DIESER, case, gender, plural), _WEAK
    if det == "two":
        return "zwei", _STRONG
    if det == "many":
        return "vielen" if case == "dat" else "viele", _STRONG
    return _EIN_WORDS[det] + _ending(_EIN, case, gender, plural), _MIXED


def noun_phrase(phrase: NP, case: str, negated: bool = False) -> list[str]:
    """Says a noun phrase in a case: ``nom``, ``acc`` or ``dat``.

    With ``negated`` an indefinite phrase carries the negation of its clause.
    """
    if phrase.pronoun:
        return [PRONOUNS[phrase.pronoun][1 + _CASES.index(case)]]
    if phrase.noun is None:
        return []
    gender, plural = phrase.noun.gender, phrase.plural
    det, endings = _determiner("no" if negated else phrase.det, case, gender, plural)
    ending = _ending(endings, case, gender, plural)
    words = [det, *(ADJECTIVES[word] + ending for word in phrase.adjectives)]
    words.append(_noun(phrase.noun, case, plural))
    if phrase.relative is not None:
        words += _relative(phrase.relative, gender, plural)
    if phrase.conjunct is not None:
        words += ["und", *noun_phrase(phrase.conjunct, case)]
    return words


def _relative(relative: Relative, gender: str, plural: bool) -> list[str]:
    """Says a relative clause, between commas."""
    case = {"subject": "nom", "place": "dat"}.get(relative.role) or _object_case(relative.clause)
    pronoun = "denen" if plural and case == "dat" else _ending(_DER, case, gender, plural)
    preposition = ["in"] if relative.role == "place" else []
    return [",", *preposition, pronoun, *clause_words(relative.clause, "final"), ","]


def _pp(phrase: PP) -> list[str]:
    """Says a prepositional phrase, with its contraction ("im")."""
    preposition, case = PREPOSITIONS[phrase.preposition]
    words = noun_phrase(phrase.np, case)
    if phrase.np.det == "the" and (preposition, words[0]) in _CONTRACTIONS:
        return [_CONTRACTIONS[preposition, words[0]], *words[1:]]
    return [preposition, *words]


def _object_case(clause: Clause) -> str:
    """The case of the verb's (only or direct) object."""
    return "dat" if clause.verb.frame == "dative" else "acc"


def _verb_group(clause: Clause) -> tuple[str, list[str], str]:
    """Splits the verb into the finite word, the words of the right bracket, and a prefix."""
    verb, plural = clause.verb, clause.subject.plural_agreement
    if verb.frame == "copula" and clause.tense in ("present", *PAST):
        if clause.tense == "present":
            return "sind" if plural else "ist", [], ""
        return "waren" if plural else "war", [], ""
    if clause.tense in PAST:
        haben, sein = ("haben", "sind") if plural else ("hat", "ist")
        return haben if verb.auxiliary == "haben" else sein, [verb.de_participle], ""
    if clause.tense in MODALS:
        return MODALS[clause.tense][plural], [verb.prefix + verb.de], ""
    return verb.de if plural else verb.de_third, [], verb.prefix


def _middle(clause: Clause) -> list[str]:
    """Says what stands between the verbs, after the subject.

    The order: pronouns, definite objects, time, "nicht", manner, indefinite objects, place. In a
    negated clause an indefinite direct object takes "kein" instead of "nicht".
    """
    early: list[str] = []
    definite: list[str] = []
    indefinite: list[str] = []
    kein = False
    for phrase, case in ((clause.recipient, "dat"), (clause.obj, _object_case(clause))):
        if phrase is None:
            continue
        carries = clause.negated and phrase is clause.obj and phrase.det in ("a", "any")
        carries = carries and phrase.noun is not None
        kein = kein or carries
        words = noun_phrase(phrase, case, carries)
        (early if phrase.pronoun else definite if phrase.definite else indefinite).extend(words)
    time = [TIMES[clause.time]] if clause.time and clause.front != "time" else []
    place = _pp(clause.place) if clause.place is not None and clause.front != "place" else []
    negation = ["nicht"] if clause.negated and not kein else []
    words = early + definite + time + negation + _manner(clause) + indefinite + place
    return [*words, ADJECTIVES[clause.predicate]] if clause.predicate else words


def _manner(clause: Clause) -> list[str]:
    if isinstance(clause.manner, PP):
        return _pp(clause.manner)
    return [MANNERS[clause.manner]] if clause.manner else []


def clause_words(clause: Clause, order: str) -> list[str]:
    """Says a clause.

    Args:
        clause: the clause.
        order: where the finite verb stands: ``second``, ``first`` (a question, or after what
            already fills the first place) or ``final``.
    """
    finite, bracket, prefix = _verb_group(clause)
    subject = noun_phrase(clause.subject, "nom")
    middle = _middle(clause)
    if order == "final":
        words = subject + middle + bracket + [prefix + finite]
    else:
        tail = middle + bracket + ([prefix] if prefix else [])
        if order == "first":
            words = [finite, *subject, *tail]
        elif clause.front:
            place = clause.front == "place" and clause.place is not None
            front = _pp(clause.place) if place and clause.place else [TIMES[clause.time]]
            words = [*front, finite, *subject, *tail]
        else:
            words = [*subject, finite, *tail]
    for number, complement in enumerate(clause.complement):
        words += ["und"] if number else [","]
        words += [COMPLEMENTIZERS[clause.complementizer], *clause_words(complement, "final")]
    return words


def _question(clause: Clause, kind: str) -> list[str]:
    words = clause_words(clause, "first")
    if kind == "whether":
        return words
    if kind == "who":
        gap = clause.subject.noun is None and not clause.subject.pronoun
        return [_WHO["nom" if gap else _object_case(clause)], *words]
    return [_QUESTION_WORDS[kind], *words]


def _conjunction(sentence: Sentence) -> str:
    """Chooses the conjunction: "when" is "als" of the past and "wenn" otherwise."""
    if sentence.conjunction != "when":
        return CONJUNCTIONS[sentence.conjunction]
    past = sentence.adverbial is not None and sentence.adverbial.tense in PAST
    return "als" if past else "wenn"


def _raw(sentence: Sentence) -> list[str]:
    """Says a sentence; commas may still meet one another or the final mark."""
    if sentence.question:
        return [*_question(sentence.main, sentence.question), "?"]
    if sentence.adverbial is None:
        words = clause_words(sentence.main, "second")
    else:
        adverbial = [_conjunction(sentence), *clause_words(sentence.adverbial, "final")]
        if sentence.adverbial_first:
            words = [*adverbial, ",", *clause_words(sentence.main, "first")]
        else:
            words = [*clause_words(sentence.main, "second"), ",", *adverbial]
    if sentence.second is not None:
        return [*words, ",", COORDINATORS[sentence.coordinator], *_raw(sentence.second)]
    return [*words, "."]


def sentence_words(sentence: Sentence) -> list[str]:
    """Says a sentence, with its final mark."""
    words = " ".join(_raw(sentence)).split()
    following = [*words[1:], ""]
    return [
        word for word, after in zip(words, following, strict=True) if not (word == "," and after in (",", ".", "?"))
    ]
