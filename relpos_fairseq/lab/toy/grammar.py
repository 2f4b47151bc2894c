"""A small grammar of English and German: a lexicon, syntax trees, and each tree's sentence in both languages.

`translate` puts a tree (`Sentence`, `Clause`, `NP`) into words, with agreement, German case, separable verbs and word
order.  `corpus.py` draws trees at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Lexicon


class Noun(NamedTuple):
    """A noun: English and German (singular, plural), German gender, kind, and weak declension."""

    en: str
    en_plural: str
    gender: str  # "m", "f" or "n"
    de: str
    de_plural: str
    kind: str  # "human", "animal", "thing", "open" (a thing that can be opened) or "place"
    weak: bool  # the singular takes the plural's form in all cases but the nominative


class Verb(NamedTuple):
    """A verb of both languages, and what it may stand with."""

    frame: str  # what it takes: "intrans", "motion", "trans", "dative", "ditrans", "clause" or "copula"
    en: tuple[str, ...]  # base form, third person singular, past, participle
    particle: str  # English: pronouns precede it ("picks him up")
    preposition: str  # English: before the object ("looks for him")
    prefix: str  # German: separable ("macht ... auf")
    de: tuple[str, ...]  # infinitive (the present plural too) and third person without the prefix; participle with it
    auxiliary: str  # German: "haben" or "sein"
    objects: tuple[str, ...]  # kinds of noun that may be its direct object
    animal_subject: bool
    complements: tuple[str, ...]  # conjunctions that may open its complement clause


# English (an irregular plural after /), gender, German singular/plural; a last * marks weak masculines.
_NOUNS = {
    "human": "man/men m Mann/Männer, woman/women f Frau/Frauen, child/children n Kind/Kinder, girl n Mädchen/Mädchen,"
    "boy m Junge/Jungen *, teacher m Lehrer/Lehrer, doctor m Arzt/Ärzte, neighbour m Nachbar/Nachbarn *,"
    "sister f Schwester/Schwestern, queen f Königin/Königinnen",
    "animal": "dog m Hund/Hunde, cat f Katze/Katzen, horse n Pferd/Pferde, bird m Vogel/Vögel, mouse/mice f Maus/Mäuse",
    "thing": "book n Buch/Bücher, apple m Apfel/Äpfel, flower f Blume/Blumen, picture n Bild/Bilder, ball m Ball/Bälle,"
    "table m Tisch/Tische, chair m Stuhl/Stühle, lamp f Lampe/Lampen, kitchen_table m Küchentisch/Küchentische,"
    "kitchen_chair m Küchenstuhl/Küchenstühle, kitchen_lamp f Küchenlampe/Küchenlampen,"
    "garden_table m Gartentisch/Gartentische, garden_flower f Gartenblume/Gartenblumen,"
    "school_book n Schulbuch/Schulbücher",
    "open": "door f Tür/Türen, window n Fenster/Fenster, letter m Brief/Briefe, bag f Tasche/Taschen,"
    "garden_door f Gartentür/Gartentüren, kitchen_window n Küchenfenster/Küchenfenster,"
    "school_bag f Schultasche/Schultaschen",
    "place": "garden m Garten/Gärten, house n Haus/Häuser, kitchen f Küche/Küchen, school f Schule/Schulen,"
    "park m Park/Parks, city/cities f Stadt/Städte, forest m Wald/Wälder",
}
# English forms (a regular verb's base form alone), +particle, ~preposition; German prefix-forms; the auxiliary where it
# is "sein"; kinds of object; * where animals may be the subject; conjunctions of a complement clause.
_VERBS = {
    "intrans": "sleep/sleeps/slept/slept schlafen/schläft/geschlafen *; laugh lachen/lacht/gelacht;"
    "sing/sings/sang/sung singen/singt/gesungen *; work arbeiten/arbeitet/gearbeitet; wait warten/wartet/gewartet *;"
    "get/gets/got/got+up auf-stehen/steht/aufgestanden sein;"
    "arrive/arrives/arrived/arrived an-kommen/kommt/angekommen sein *",
    "motion": "go/goes/went/gone gehen/geht/gegangen sein; run/runs/ran/run laufen/läuft/gelaufen sein *",
    "trans": "see/sees/saw/seen sehen/sieht/gesehen human animal thing open place *;"
    "find/finds/found/found finden/findet/gefunden human animal thing open place *;"
    "love/loves/loved/loved lieben/liebt/geliebt human animal thing open place *;"
    "hear/hears/heard/heard hören/hört/gehört human animal *;"
    "look~for suchen/sucht/gesucht human animal thing open place *;"
    "buy/buys/bought/bought kaufen/kauft/gekauft animal thing open;"
    "carry/carries/carried/carried tragen/trägt/getragen animal thing;"
    "paint malen/malt/gemalt human animal thing open place; visit besuchen/besucht/besucht human place;"
    "open auf-machen/macht/aufgemacht open; close/closes/closed/closed zu-machen/macht/zugemacht open;"
    "call an-rufen/ruft/angerufen human; invite/invites/invited/invited ein-laden/lädt/eingeladen human;"
    "pick+up ab-holen/holt/abgeholt human animal thing;"
    "bring/brings/brought/brought+along mit-bringen/bringt/mitgebracht human animal thing",
    "dative": "help helfen/hilft/geholfen human animal *; thank danken/dankt/gedankt human;"
    "follow folgen/folgt/gefolgt sein human animal *; listen~to zu-hören/hört/zugehört human animal *",
    "ditrans": "give/gives/gave/given geben/gibt/gegeben thing animal;"
    "show/shows/showed/shown zeigen/zeigt/gezeigt thing animal open;"
    "send/sends/sent/sent schicken/schickt/geschickt thing open",
    "clause": "say/says/said/said sagen/sagt/gesagt that; think/thinks/thought/thought denken/denkt/gedacht that;"
    "know/knows/knew/known wissen/weiß/gewusst that whether; ask fragen/fragt/gefragt whether",
    "copula": "be/is/was/been sein/ist/gewesen sein *",
}


def _nouns() -> dict[str, Noun]:
    """Read the table of nouns, by their English singular."""
    found = {}
    for kind, entries in _NOUNS.items():
        for entry in entries.split(","):
            english, gender, german, *weak = entry.split()
            en, _, en_plural = english.replace("_", " ").partition("/")
            de, de_plural = german.split("/")
            found[en] = Noun(en, en_plural or f"{en}s", gender, de, de_plural, kind, bool(weak))
    return found


def _verbs() -> dict[str, Verb]:
    """Read the table of verbs, by their English base form with its particle or preposition."""
    found = {}
    for frame, entries in _VERBS.items():
        for entry in entries.split(";"):
            english, german, *marks = entry.split()
            english, _, preposition = english.partition("~")
            english, _, particle = english.partition("+")
            prefix, _, german = german.rpartition("-")
            forms = tuple(english.split("/")) if "/" in english else (english, english + "s", *[english + "ed"] * 2)
            auxiliary = "sein" if "sein" in marks else "haben"
            objects = tuple(mark for mark in marks if mark in _NOUNS)
            complements = tuple(mark for mark in marks if mark in ("that", "whether"))
            words = (forms, particle, preposition, prefix, tuple(german.split("/")), auxiliary)
            found[" ".join(filter(None, (forms[0], particle, preposition)))] = Verb(
                frame, *words, objects, "*" in marks, complements
            )
    return found


def _pairs(entries: str) -> dict[str, str]:
    return dict(entry.strip().split(": ") for entry in entries.split(","))


NOUNS, VERBS = _nouns(), _verbs()
ADJECTIVES = _pairs(
    "small: klein, big: groß, old: alt, young: jung, new: neu, red: rot, black: schwarz, beautiful: schön,"
    "friendly: freundlich, famous: berühmt"
)
_ADJECTIVES_OF = _pairs(
    "human: small big old young friendly famous beautiful, animal: small big old young black friendly beautiful,"
    "thing: small big old new red black beautiful, open: small big old new red black,"
    "place: small big old new beautiful famous"
)
ADJECTIVES_OF = {kind: adjectives.split() for kind, adjectives in _ADJECTIVES_OF.items()}
TIMES = _pairs(
    "today: heute, now: jetzt, often: oft, yesterday: gestern, tomorrow: morgen, every day: jeden Tag,"
    "in the evening: am Abend"
)
MANNERS = _pairs("quickly: schnell, slowly: langsam, quietly: leise, gladly: gern")
PREPOSITIONS = _pairs(  # German preposition and the case that it governs
    "in: in dat, into: in acc, behind: hinter dat, in front of: vor dat, with: mit dat, without: ohne acc"
)
# Conjunctions that open adverbial and complement clauses, and those between main clauses.
CONJUNCTIONS = _pairs("because: weil, although: obwohl, while: während, before: bevor")
COMPLEMENTIZERS = _pairs("that: dass, whether: ob")
COORDINATORS = _pairs("and: und, but: aber")
MODALS = _pairs("can: kann können, must: muss müssen, should: soll sollen, want: will wollen, future: wird werden")
# English subject form -> English object form, German nominative, accusative, dative.
PRONOUNS = _pairs("he: him er ihn ihm, she: her sie sie ihr, we: us wir uns uns, they: them sie sie ihnen")
DEFINITE, PAST = ("the", "this", "my", "his"), ("past", "perfect")


# Syntax trees


@dataclass(frozen=True)
class Relative:
    """A relative clause, with a gap where the pronoun's noun would stand."""

    clause: Clause
    role: str  # of the gap in the clause: "subject", "object" or "place"


@dataclass(frozen=True)
class NP:
    """A noun phrase: a noun or a pronoun, perhaps joined with another phrase; with neither, a gap."""

    noun: Noun | None = None
    pronoun: str = ""  # English subject form
    det: str = "the"  # English: "the", "a", "this", "my", "his", "no", "two", "many" or "any"
    plural: bool = False
    adjectives: tuple[str, ...] = ()
    relative: Relative | None = None
    conjunct: NP | None = None  # a second noun phrase after "and"

    @property
    def plural_agreement(self) -> bool:
        """True if a verb agrees with the phrase in the plural."""
        return self.plural or self.pronoun in ("we", "they") or self.conjunct is not None

    @property
    def definite(self) -> bool:
        """True for a definite phrase, which stands earlier in the German clause."""
        return self.det in DEFINITE


class PP(NamedTuple):
    """A prepositional phrase: an English preposition and its noun phrase."""

    preposition: str
    np: NP


@dataclass(frozen=True)
class Clause:
    """A clause without a word order."""

    subject: NP
    verb: Verb
    tense: str = "present"  # "present", "past", "perfect", "future" or a modal
    negated: bool = False
    obj: NP | None = None  # direct object; of the frame "dative" the dative object
    recipient: NP | None = None
    recipient_last: bool = False  # English: "to" and the recipient after the object
    predicate: str = ""  # adjective after the copula
    place: PP | None = None
    manner: str | PP = ""  # adverb, or a phrase with "with" or "without"
    time: str = ""
    front: str = ""  # "time" or "place" where that part opens the clause
    complementizer: str = ""
    complement: tuple[Clause, ...] = ()  # complement clauses, joined with "and"


@dataclass(frozen=True)
class Sentence:
    """A main clause, an adverbial clause and a second sentence; or a question."""

    main: Clause
    question: str = ""  # empty, "whether" for a yes-no question, or the English question word
    conjunction: str = ""  # opens the adverbial clause
    adverbial: Clause | None = None
    adverbial_first: bool = False
    coordinator: str = ""  # opens the second sentence
    second: Sentence | None = None


# English word order


def _en_np(phrase: NP, subject: bool = False) -> list[str]:
    if phrase.pronoun:
        return [phrase.pronoun if subject else PRONOUNS[phrase.pronoun].split()[0]]
    if phrase.noun is None:
        return []
    words = [*phrase.adjectives, *(phrase.noun.en_plural if phrase.plural else phrase.noun.en).split()]
    det = "these" if phrase.plural and phrase.det == "this" else phrase.det
    words.insert(0, "an" if det == "a" and words[0][0] in "aeiou" else det)
    if phrase.relative is not None:
        pronoun = "who" if phrase.noun.kind == "human" else "that"
        words += ["in", "which"] if phrase.relative.role == "place" else [pronoun]
        words += _en_clause(phrase.relative.clause)
    return words + (["and", *_en_np(phrase.conjunct, subject)] if phrase.conjunct is not None else [])


def _en_verb(clause: Clause, support: bool) -> tuple[str, list[str]]:
    """Return the finite verb, an auxiliary if `support`, and the words that follow it or follow "not"."""
    verb, plural, past = clause.verb, clause.subject.plural_agreement, clause.tense == "past"
    (base, third, simple_past, participle), more = verb.en, []
    if clause.tense == "perfect":
        return "have" if plural else "has", [participle]
    if clause.tense not in ("present", "past", "want"):
        return "will" if clause.tense == "future" else clause.tense, [base]
    if clause.tense == "want":
        base, third, more = "want", "wants", ["to", base]
    elif verb.frame == "copula":
        forms = ("were", "was") if past else ("are", "is")
        return forms[not plural], []
    if support:
        return "did" if past else "do" if plural else "does", [base, *more]
    return simple_past if past else base if plural else third, more


def _en_objects(clause: Clause) -> list[str]:
    """Return the verb's particle or preposition and its objects."""
    particle, words = clause.verb.particle.split(), _en_np(clause.obj or NP())
    words = words + particle if clause.obj is not None and clause.obj.pronoun else particle + words
    words = clause.verb.preposition.split() + words
    recipient = _en_np(clause.recipient or NP())
    return [*words, "to", *recipient] if clause.recipient_last else recipient + words


def _en_pp(phrase: PP | None) -> list[str]:
    return [*phrase.preposition.split(), *_en_np(phrase.np)] if phrase is not None else []


def _en_clause(clause: Clause, inverted: bool = False) -> list[str]:
    """Return a clause's words; `inverted`: the finite verb precedes the subject, as in questions."""
    finite, rest = _en_verb(clause, clause.negated or inverted)
    subject = _en_np(clause.subject, subject=True)
    words = [finite, *subject] if inverted else [*subject, finite]
    words += ["not"] * clause.negated + rest + _en_objects(clause) + clause.predicate.split()
    words += _en_pp(clause.manner) if isinstance(clause.manner, PP) else clause.manner.split()
    place, time = _en_pp(clause.place), clause.time.split()
    front, last = {"time": (time, place), "place": (place, time)}.get(clause.front, ([], place + time))
    words = front + words + last
    for number, complement in enumerate(clause.complement):
        words += ["and"] * (number > 0) + [clause.complementizer, *_en_clause(complement)]
    return words


def _english(sentence: Sentence) -> list[str]:
    main = sentence.main
    if sentence.question == "whether":
        return [*_en_clause(main, inverted=True), "?"]
    if sentence.question:
        subject_asked = main.subject.noun is None and not main.subject.pronoun
        return [sentence.question, *_en_clause(main, inverted=not subject_asked), "?"]
    words = _en_clause(main)
    if sentence.adverbial is not None:
        adverbial = [sentence.conjunction, *_en_clause(sentence.adverbial)]
        words = [*adverbial, ",", *words] if sentence.adverbial_first else words + adverbial
    if sentence.second is not None:
        return [*words, ",", sentence.coordinator, *_english(sentence.second)]
    return [*words, "."]


# German inflection and word order

_CASES = ("nom", "acc", "dat")
# Endings by case, for masculine, feminine, neuter and plural; "-" is none.
_THE = {"nom": "der die das die", "acc": "den die das die", "dat": "dem der dem den"}
_THIS = {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"}  # and adjectives without an article
_A = {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"}
_WEAK = {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"}  # adjectives after "der"
_MIXED = {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"}  # adjectives after "ein"
_CONTRACTIONS = _pairs("in dem: im, in das: ins")
_POSSESSIVE = _pairs("a: ein, no: kein, any: kein, my: mein, his: sein")
_QUESTION_WORDS = {"whether": ""} | _pairs("where: wo, when: wann, why: warum, what: was")
_WHO = _pairs("nom: wer, acc: wen, dat: wem")


def _determiner(det: str, case: str, ending) -> tuple[str, dict[str, str]]:
    """Return the inflected determiner, and the endings of the adjectives after it."""
    if det == "the":
        return ending(_THE), _WEAK
    if det == "this":
        return "dies" + ending(_THIS), _WEAK
    if det in ("two", "many"):
        return "zwei" if det == "two" else "vielen" if case == "dat" else "viele", _THIS
    return _POSSESSIVE[det] + ending(_A), _MIXED


def _de_np(phrase: NP, case: str, negated: bool = False) -> list[str]:
    """Return a noun phrase's words; `negated`: an indefinite phrase says the negation of its clause."""
    if phrase.pronoun:
        return [PRONOUNS[phrase.pronoun].split()[1 + _CASES.index(case)]]
    if phrase.noun is None:
        return []
    noun, plural = phrase.noun, phrase.plural

    def ending(endings: dict[str, str]) -> str:
        return endings[case].split()[3 if plural else "mfn".index(noun.gender)].strip("-")

    det, endings = _determiner("no" if negated else phrase.det, case, ending)
    word = noun.de_plural if plural or (noun.weak and case != "nom") else noun.de
    word += "n" * (plural and case == "dat" and word[-1] not in "ns")
    words = [det, *(ADJECTIVES[one] + ending(endings) for one in phrase.adjectives), word]
    if phrase.relative is not None:
        words += _de_relative(phrase.relative, noun.gender, plural)
    return words + (["und", *_de_np(phrase.conjunct, case)] if phrase.conjunct is not None else [])


def _de_relative(relative: Relative, gender: str, plural: bool) -> list[str]:
    """Return a relative clause between commas."""
    case = {"subject": "nom", "place": "dat"}.get(relative.role) or _object_case(relative.clause)
    pronoun = "denen" if plural and case == "dat" else _THE[case].split()[3 if plural else "mfn".index(gender)]
    return [",", *["in"] * (relative.role == "place"), pronoun, *_de_clause(relative.clause, "final"), ","]


def _de_pp(phrase: PP | None) -> list[str]:
    if phrase is None:
        return []
    preposition, case = PREPOSITIONS[phrase.preposition].split()
    first, *words = _de_np(phrase.np, case)
    if phrase.np.det == "the" and f"{preposition} {first}" in _CONTRACTIONS:
        return [_CONTRACTIONS[f"{preposition} {first}"], *words]
    return [preposition, first, *words]


def _object_case(clause: Clause) -> str:
    return "dat" if clause.verb.frame == "dative" else "acc"


def _de_verb(clause: Clause) -> tuple[str, list[str], str]:
    """Return the finite verb, the words of the right bracket, and a separable prefix."""
    verb, plural = clause.verb, clause.subject.plural_agreement
    infinitive, third, participle = verb.de
    if verb.frame == "copula" and clause.tense in ("present", *PAST):
        forms = ("sind", "ist") if clause.tense == "present" else ("waren", "war")
        return forms[not plural], [], ""
    if clause.tense in PAST:
        forms = ("haben", "hat") if verb.auxiliary == "haben" else ("sind", "ist")
        return forms[not plural], [participle], ""
    if clause.tense in MODALS:
        return MODALS[clause.tense].split()[plural], [verb.prefix + infinitive], ""
    return infinitive if plural else third, [], verb.prefix


def _middle(clause: Clause) -> list[str]:
    """Return what stands between the verbs after the subject.

    The order: pronouns, definite objects, time, "nicht", manner, indefinite objects, place.  In a negated clause an
    indefinite direct object takes "kein" instead of "nicht".
    """
    obj, recipient = clause.obj or NP(), clause.recipient or NP()
    kein = clause.negated and obj.noun is not None and obj.det in ("a", "any")
    places: dict[str, list[str]] = {"pronoun": [], "definite": [], "indefinite": []}
    for phrase, words in ((recipient, _de_np(recipient, "dat")), (obj, _de_np(obj, _object_case(clause), kein))):
        places["pronoun" if phrase.pronoun else "definite" if phrase.definite else "indefinite"] += words
    words = places["pronoun"] + places["definite"]
    words += [TIMES[clause.time]] if clause.time and clause.front != "time" else []
    words += ["nicht"] * (clause.negated and not kein)
    words += _de_pp(clause.manner) if isinstance(clause.manner, PP) else [MANNERS[one] for one in clause.manner.split()]
    words += places["indefinite"] + (_de_pp(clause.place) if clause.front != "place" else [])
    return words + [ADJECTIVES[one] for one in clause.predicate.split()]


def _de_clause(clause: Clause, order: str) -> list[str]:
    """Return a clause's words with its finite verb `second`, `first` (questions, or after another part) or `final`."""
    finite, bracket, prefix = _de_verb(clause)
    subject, middle = _de_np(clause.subject, "nom"), _middle(clause)
    if order == "final":
        words = [*subject, *middle, *bracket, prefix + finite]
    elif order == "first":
        words = [finite, *subject, *middle, *bracket, *prefix.split()]
    elif clause.front:
        front = _de_pp(clause.place) if clause.front == "place" and clause.place else [TIMES[clause.time]]
        words = [*front, finite, *subject, *middle, *bracket, *prefix.split()]
    else:
        words = [*subject, finite, *middle, *bracket, *prefix.split()]
    for number, complement in enumerate(clause.complement):
        words += ["und" if number else ",", COMPLEMENTIZERS[clause.complementizer], *_de_clause(complement, "final")]
    return words


def _german(sentence: Sentence) -> list[str]:
    """Return a sentence's words, where commas may still stand before another comma or the final mark."""
    main, kind = sentence.main, sentence.question
    words = _de_clause(main, "first" if kind or sentence.adverbial_first else "second")
    if kind == "who":
        subject_asked = main.subject.noun is None and not main.subject.pronoun
        return [_WHO["nom" if subject_asked else _object_case(main)], *words, "?"]
    if kind:
        return [*_QUESTION_WORDS[kind].split(), *words, "?"]
    if sentence.adverbial is not None:
        when = "als" if sentence.adverbial.tense in PAST else "wenn"
        adverbial = [CONJUNCTIONS.get(sentence.conjunction, when), *_de_clause(sentence.adverbial, "final")]
        words = [*adverbial, ",", *words] if sentence.adverbial_first else [*words, ",", *adverbial]
    if sentence.second is not None:
        return [*words, ",", COORDINATORS[sentence.coordinator], *_german(sentence.second)]
    return [*words, "."]


def translate(sentence: Sentence) -> tuple[str, str]:
    """Return a sentence in English and in German, tokens separated by single spaces."""
    words = " ".join(_german(sentence)).split()
    german = [word for word, after in zip(words, [*words[1:], ""], strict=True) if word != "," or after not in ",.?"]
    return " ".join(_english(sentence)), " ".join(german)
