"""English: from trees to words."""

from __future__ import annotations

from .syntax import NP, PP, Clause, Relative, Sentence
from .words import PRONOUNS

_PLURAL_DETERMINERS = {"this": "these"}


def noun_phrase(phrase: NP, subject: bool = False) -> list[str]:
    """Says a noun phrase, as a subject or as an object."""
    if phrase.pronoun:
        return [phrase.pronoun if subject else PRONOUNS[phrase.pronoun][0]]
    if phrase.noun is None:
        return []
    det = _PLURAL_DETERMINERS.get(phrase.det, phrase.det) if phrase.plural else phrase.det
    noun = phrase.noun.en_plural if phrase.plural else phrase.noun.en
    words = [*phrase.adjectives, *noun.split()]
    if det == "a" and words[0][0] in "aeiou":
        det = "an"
    words.insert(0, det)
    if phrase.relative is not None:
        words += _relative(phrase.relative, phrase.noun.kind == "human")
    if phrase.conjunct is not None:
        words += ["and", *noun_phrase(phrase.conjunct, subject)]
    return words


def _relative(relative: Relative, human: bool) -> list[str]:
    """Says a relative clause after a noun."""
    if relative.role == "place":
        return ["in", "which", *clause_words(relative.clause)]
    return ["who" if human else "that", *clause_words(relative.clause)]


def _verb_group(clause: Clause, support: bool) -> tuple[str, list[str]]:
    """Splits the verb into the finite word and the words after it; "not" goes between the two.

    With ``support`` the finite word must be an auxiliary (negation, questions).
    """
    verb, plural = clause.verb, clause.subject.plural_agreement
    if clause.tense == "perfect":
        return "have" if plural else "has", [verb.en_participle]
    if clause.tense == "want":
        if support:
            return "do" if plural else "does", ["want", "to", verb.en]
        return "want" if plural else "wants", ["to", verb.en]
    if clause.tense not in ("present", "past"):
        return "will" if clause.tense == "future" else clause.tense, [verb.en]
    past = clause.tense == "past"
    if verb.frame == "copula":
        if past:
            return "were" if plural else "was", []
        return "are" if plural else "is", []
    if support:
        return "did" if past else "do" if plural else "does", [verb.en]
    if past:
        return verb.en_past, []
    return verb.en if plural else verb.en_third, []


def _objects(clause: Clause) -> list[str]:
    """Says the verb's particle or preposition, and its objects."""
    particle = [clause.verb.particle] if clause.verb.particle else []
    obj = noun_phrase(clause.obj) if clause.obj is not None else []
    if clause.obj is not None and clause.obj.pronoun:
        words = obj + particle
    else:
        words = particle + obj
    if clause.verb.preposition:
        words.insert(0, clause.verb.preposition)
    if clause.recipient is None:
        return words
    recipient = noun_phrase(clause.recipient)
    return [*words, "to", *recipient] if clause.recipient_last else recipient + words


def _pp(phrase: PP) -> list[str]:
    return [*phrase.preposition.split(), *noun_phrase(phrase.np)]


def clause_words(clause: Clause, inverted: bool = False) -> list[str]:
    """Says a clause; ``inverted``: the finite verb comes before the subject, as in questions."""
    finite, rest = _verb_group(clause, clause.negated or inverted)
    subject = noun_phrase(clause.subject, subject=True)
    words = [finite, *subject] if inverted else [*subject, finite]
    if clause.negated:
        words.append("not")
    words += rest + _objects(clause)
    if clause.predicate:
        words.append(clause.predicate)
    manner = clause.manner
    words += _pp(manner) if isinstance(manner, PP) else manner.split()
    place = _pp(clause.place) if clause.place is not None else []
    time = clause.time.split()
    if clause.front == "time":
        words = time + words + place
    elif clause.front == "place":
        words = place + words + time
    else:
        words += place + time
    for number, complement in enumerate(clause.complement):
        words += ["and"] * (number > 0) + [clause.complementizer, *clause_words(complement)]
    return words


def _question(clause: Clause, kind: str) -> list[str]:
    if kind == "whether":
        return clause_words(clause, inverted=True)
    subject_asked = clause.subject.noun is None and not clause.subject.pronoun
    return [kind, *clause_words(clause, inverted=not subject_asked)]


def sentence_words(sentence: Sentence) -> list[str]:
    """Says a sentence, with its final mark."""
    if sentence.question:
        return [*_question(sentence.main, sentence.question), "?"]
    words = clause_words(sentence.main)
    if sentence.adverbial is not None:
        adverbial = [sentence.conjunction, *clause_words(sentence.adverbial)]
        words = [*adverbial, ",", *words] if sentence.adverbial_first else words + adverbial
    if sentence.second is not None:
        return [*words, ",", sentence.coordinator, *sentence_words(sentence.second)]
    return [*words, "."]
