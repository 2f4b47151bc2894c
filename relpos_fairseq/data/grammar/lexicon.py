"""The nouns and verbs of the grammar, with the features that its rules need."""

from __future__ import annotations

from dataclasses import dataclass

from .words import COMPLEMENTIZERS


@dataclass(frozen=True)
class Noun:
    """A noun of both languages."""

    en: str  # English singular (compounds have two words)
    en_plural: str  # English plural
    gender: str  # German gender: ``m``, ``f`` or ``n``
    de: str  # German nominative singular
    de_plural: str  # German nominative plural
    kind: str  # ``human``, ``animal``, ``thing``, ``open`` (a thing to open) or ``place``
    weak: bool = False  # whether the German noun takes the plural form in the oblique singular


@dataclass(frozen=True)
class Verb:
    """A verb of both languages."""

    # what the verb takes: ``intrans``, ``motion``, ``trans``, ``dative``, ``ditrans``, ``clause``
    # or ``copula``
    frame: str
    en: str  # English base form
    en_third: str  # English third person singular
    en_past: str  # English simple past
    en_participle: str  # English past participle
    particle: str  # English particle that pronoun objects precede ("picks him up")
    preposition: str  # English preposition before the object ("looks for him")
    prefix: str  # German separable prefix
    de: str  # German infinitive without the prefix, also the present plural
    de_third: str  # German third person singular without the prefix
    de_participle: str  # German participle, with the prefix
    auxiliary: str  # ``haben`` or ``sein``
    objects: tuple[str, ...]  # kinds of noun that the verb takes as its direct object
    animal_subject: bool  # whether animals may be its subject
    complements: tuple[str, ...]  # the conjunctions that open its complement clause

    @property
    def key(self) -> str:
        """The name of the verb: its base form with the particle or preposition."""
        return " ".join(part for part in (self.en, self.particle, self.preposition) if part)


# English singular / plural, gender, German singular / plural; "weak" marks weak masculines.
_NOUNS = {
    "human": """
        man/men m Mann/Männer
        woman/women f Frau/Frauen
        child/children n Kind/Kinder
        girl/girls n Mädchen/Mädchen
        boy/boys m Junge/Jungen weak
        teacher/teachers m Lehrer/Lehrer
        doctor/doctors m Arzt/Ärzte
        neighbour/neighbours m Nachbar/Nachbarn weak
        sister/sisters f Schwester/Schwestern
        queen/queens f Königin/Königinnen""",
    "animal": """
        dog/dogs m Hund/Hunde
        cat/cats f Katze/Katzen
        horse/horses n Pferd/Pferde
        bird/birds m Vogel/Vögel
        mouse/mice f Maus/Mäuse""",
    "thing": """
        book/books n Buch/Bücher
        apple/apples m Apfel/Äpfel
        flower/flowers f Blume/Blumen
        picture/pictures n Bild/Bilder
        ball/balls m Ball/Bälle
        table/tables m Tisch/Tische
        chair/chairs m Stuhl/Stühle
        lamp/lamps f Lampe/Lampen
        kitchen_table/kitchen_tables m Küchentisch/Küchentische
        kitchen_chair/kitchen_chairs m Küchenstuhl/Küchenstühle
        kitchen_lamp/kitchen_lamps f Küchenlampe/Küchenlampen
        garden_table/garden_tables m Gartentisch/Gartentische
        garden_flower/garden_flowers f Gartenblume/Gartenblumen
        school_book/school_books n Schulbuch/Schulbücher""",
    "open": """
        door/doors f Tür/Türen
        window/windows n Fenster/Fenster
        letter/letters m Brief/Briefe
        bag/bags f Tasche/Taschen
        garden_door/garden_doors f Gartentür/Gartentüren
        kitchen_window/kitchen_windows n Küchenfenster/Küchenfenster
        school_bag/school_bags f Schultasche/Schultaschen""",
    "place": """
        garden/gardens m Garten/Gärten
        house/houses n Haus/Häuser
        kitchen/kitchens f Küche/Küchen
        school/schools f Schule/Schulen
        park/parks m Park/Parks
        city/cities f Stadt/Städte
        forest/forests m Wald/Wälder""",
}

_ANY = "human animal thing open place"
# frame | English forms | particle, preposition | prefix, German forms, auxiliary | objects | flags
_VERBS = f"""
    intrans | sleep sleeps slept slept | - - | - schlafen schläft geschlafen haben | - | animal
    intrans | laugh laughs laughed laughed | - - | - lachen lacht gelacht haben | - |
    intrans | sing sings sang sung | - - | - singen singt gesungen haben | - | animal
    intrans | work works worked worked | - - | - arbeiten arbeitet gearbeitet haben | - |
    intrans | wait waits waited waited | - - | - warten wartet gewartet haben | - | animal
    intrans | get gets got got | up - | auf stehen steht aufgestanden sein | - |
    intrans | arrive arrives arrived arrived | - - | an kommen kommt angekommen sein | - | animal
    motion | go goes went gone | - - | - gehen geht gegangen sein | - |
    motion | run runs ran run | - - | - laufen läuft gelaufen sein | - | animal
    trans | see sees saw seen | - - | - sehen sieht gesehen haben | {_ANY} | animal
    trans | find finds found found | - - | - finden findet gefunden haben | {_ANY} | animal
    trans | love loves loved loved | - - | - lieben liebt geliebt haben | {_ANY} | animal
    trans | hear hears heard heard | - - | - hören hört gehört haben | human animal | animal
    trans | look looks looked looked | - for | - suchen sucht gesucht haben | {_ANY} | animal
    trans | buy buys bought bought | - - | - kaufen kauft gekauft haben | animal thing open |
    trans | carry carries carried carried | - - | - tragen trägt getragen haben | animal thing |
    trans | paint paints painted painted | - - | - malen malt gemalt haben | {_ANY} |
    trans | visit visits visited visited | - - | - besuchen besucht besucht haben | human place |
    trans | open opens opened opened | - - | auf machen macht aufgemacht haben | open |
    trans | close closes closed closed | - - | zu machen macht zugemacht haben | open |
    trans | call calls called called | - - | an rufen ruft angerufen haben | human |
    trans | invite invites invited invited | - - | ein laden lädt eingeladen haben | human |
    trans | pick picks picked picked | up - | ab holen holt abgeholt haben | human animal thing |
    trans | bring brings brought brought | along - | mit bringen bringt mitgebracht haben |\
        human animal thing |
    dative | help helps helped helped | - - | - helfen hilft geholfen haben | human animal | animal
    dative | thank thanks thanked thanked | - - | - danken dankt gedankt haben | human |
    dative | follow follows followed followed | - - | - folgen folgt gefolgt sein |\
        human animal | animal
    dative | listen listens listened listened | - to | zu hören hört zugehört haben |\
        human animal | animal
    ditrans | give gives gave given | - - | - geben gibt gegeben haben | thing animal |
    ditrans | show shows showed shown | - - | - zeigen zeigt gezeigt haben | thing animal open |
    ditrans | send sends sent sent | - - | - schicken schickt geschickt haben | thing open |
    clause | say says said said | - - | - sagen sagt gesagt haben | - | that
    clause | think thinks thought thought | - - | - denken denkt gedacht haben | - | that
    clause | know knows knew known | - - | - wissen weiß gewusst haben | - | that whether
    clause | ask asks asked asked | - - | - fragen fragt gefragt haben | - | whether
    copula | be is was been | - - | - sein ist gewesen sein | - | animal thing
"""


def _read_nouns() -> dict[str, Noun]:
    nouns = {}
    for kind, table in _NOUNS.items():
        for line in table.strip().splitlines():
            english, gender, german, *weak = line.split()
            en, en_plural = english.replace("_", " ").split("/")
            de, de_plural = german.split("/")
            nouns[en] = Noun(en, en_plural, gender, de, de_plural, kind, bool(weak))
    return nouns


def _read_verbs() -> dict[str, Verb]:
    verbs = {}
    for line in _VERBS.strip().splitlines():
        frame, english, extra, german, objects, flags = (part.strip() for part in line.split("|"))
        particle, preposition = extra.replace("-", " - ").split()
        prefix, de, de_third, de_participle, auxiliary = german.split()
        marks = flags.split()
        verb = Verb(
            frame,
            *english.split(),
            particle.strip("-"),
            preposition.strip("-"),
            prefix.strip("-"),
            de,
            de_third,
            de_participle,
            auxiliary,
            tuple(objects.strip("-").split()),
            "animal" in marks,
            tuple(mark for mark in marks if mark in COMPLEMENTIZERS),
        )
        verbs[verb.key] = verb
    return verbs


NOUNS = _read_nouns()
VERBS = _read_verbs()
