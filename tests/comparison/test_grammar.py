"""The built-in English-German grammar and its corpus."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from helpers.shell import Shell
from relpos_fairseq.lab.toy import grammar
from relpos_fairseq.lab.toy.corpus import Corpus, GrammarError, Sampler, build, write
from relpos_fairseq.lab.toy.grammar import NP, PP, Clause, Relative, Sentence, translate

SIZES = {"train": 1500, "valid": 100, "test": 100, "test_long": 60}
KNOWN = [
    "yesterday the bird slept in the garden .",
    "my children run .",
    "the old horses have heard the bird and the mouse .",
]


def np(head: str, det: str = "the", *adjectives: str, plural=False, relative=None, conjunct=None) -> NP:
    """A noun phrase of an English singular noun, or of a pronoun's subject form."""
    if head in grammar.PRONOUNS:
        return NP(pronoun=head)
    return NP(grammar.NOUNS[head], "", det, plural, adjectives, relative, conjunct)


def clause(subject: NP, verb: str, **features: object) -> Clause:
    """A clause of a subject, a verb by its name ("pick up") and other fields of `Clause`."""
    return Clause(subject, grammar.VERBS[verb], **features)


MAN, WOMAN, DOG, CAT, DOOR, BOOK = map(np, ("man", "woman", "dog", "cat", "door", "book"))
HE, SHE, THEY = map(np, ("he", "she", "they"))
GAP, GAPS = NP(), NP(plural=True)
IN_GARDEN = PP("in", np("garden"))
SEES_DOG = clause(MAN, "see", obj=DOG)
OPENS = clause(MAN, "open", obj=DOOR)


def main(subject: NP, verb: str, **features: object) -> Sentence:
    """A sentence of one clause."""
    return Sentence(clause(subject, verb, **features))


def says(*complement: Clause, verb: str = "say", word: str = "that") -> Sentence:
    """A sentence about what the woman says or asks."""
    return main(WOMAN, verb, complementizer=word, complement=complement)


def where(word: str, adverbial: Clause, first: bool = False) -> Sentence:
    """A sentence with an adverbial clause; the woman laughs in the main clause."""
    return Sentence(clause(WOMAN, "laugh"), "", word, adverbial, first)


def that(head: str, role: str, inner: Clause, **features: bool) -> NP:
    """A noun phrase with a relative clause."""
    return np(head, relative=Relative(inner, role), **features)


# A sentence in both languages, and how it is made.
ORDER = {
    "the man sees the dog . | der Mann sieht den Hund .": Sentence(SEES_DOG),
    "the dog sees the man . | der Hund sieht den Mann .": main(DOG, "see", obj=MAN),
    "today the man sees the dog . | heute sieht der Mann den Hund .": main(
        MAN, "see", obj=DOG, time="today", front="time"
    ),
    "in the garden the man sees the dog now . | im Garten sieht der Mann den Hund jetzt .": main(
        MAN, "see", obj=DOG, place=IN_GARDEN, time="now", front="place"
    ),
    "the man works quietly in the garden in the evening . | der Mann arbeitet am Abend leise im Garten .": main(
        MAN, "work", manner="quietly", place=IN_GARDEN, time="in the evening"
    ),
    "the man buys an apple every day . | der Mann kauft jeden Tag einen Apfel .": main(
        MAN, "buy", obj=np("apple", "a"), time="every day"
    ),
    "the man buys the book every day . | der Mann kauft das Buch jeden Tag .": main(
        MAN, "buy", obj=BOOK, time="every day"
    ),
    "the woman says that the man sees the dog . | die Frau sagt , dass der Mann den Hund sieht .": says(SEES_DOG),
    "the woman asks whether the man sees the dog . | die Frau fragt , ob der Mann den Hund sieht .": says(
        SEES_DOG, verb="ask", word="whether"
    ),
    "the woman laughs because the man sees the dog . | die Frau lacht , weil der Mann den Hund sieht .": where(
        "because", SEES_DOG
    ),
    "although the man sees the dog , the woman laughs . | obwohl der Mann den Hund sieht , lacht die Frau .": where(
        "although", SEES_DOG, True
    ),
    "the woman laughs when the man sees the dog . | die Frau lacht , wenn der Mann den Hund sieht .": where(
        "when", SEES_DOG
    ),
    "the woman laughs when the man saw the dog . | die Frau lacht , als der Mann den Hund gesehen hat .": where(
        "when", clause(MAN, "see", tense="past", obj=DOG)
    ),
    "the man sees the dog , but now she waits . | der Mann sieht den Hund , aber jetzt wartet sie .": Sentence(
        SEES_DOG, coordinator="but", second=main(SHE, "wait", time="now", front="time")
    ),
    "the woman says that the man opens the door and that the dog sleeps . | "
    "die Frau sagt , dass der Mann die Tür aufmacht und dass der Hund schläft .": says(OPENS, clause(DOG, "sleep")),
    "does the man see the dog ? | sieht der Mann den Hund ?": Sentence(SEES_DOG, "whether"),
    "who sees the dog ? | wer sieht den Hund ?": Sentence(clause(GAP, "see", obj=DOG), "who"),
    "who does the man see ? | wen sieht der Mann ?": Sentence(clause(MAN, "see", obj=GAP), "who"),
    "who does the man help ? | wem hilft der Mann ?": Sentence(clause(MAN, "help", obj=GAP), "who"),
    "when does the man open the door ? | wann macht der Mann die Tür auf ?": Sentence(OPENS, "when"),
}

VERBS = {
    "the man opens the door . | der Mann macht die Tür auf .": Sentence(OPENS),
    "the woman laughs because the man opens the door . | die Frau lacht , weil der Mann die Tür aufmacht .": where(
        "because", OPENS
    ),
    "the man has opened the door . | der Mann hat die Tür aufgemacht .": main(MAN, "open", tense="perfect", obj=DOOR),
    "the man must open the door . | der Mann muss die Tür aufmachen .": main(MAN, "open", tense="must", obj=DOOR),
    "the woman says that the man wants to open the door . | "
    "die Frau sagt , dass der Mann die Tür aufmachen will .": says(clause(MAN, "open", tense="want", obj=DOOR)),
    "they pick him up . | sie holen ihn ab .": main(THEY, "pick up", obj=HE),
    "they pick up the cat . | sie holen die Katze ab .": main(THEY, "pick up", obj=CAT),
    "the man has gone into the kitchen . | der Mann ist in die Küche gegangen .": main(
        MAN, "go", tense="perfect", place=PP("into", np("kitchen"))
    ),
    "the man went into the house yesterday . | der Mann ist gestern ins Haus gegangen .": main(
        MAN, "go", tense="past", place=PP("into", np("house")), time="yesterday"
    ),
    "the men bought the book . | die Männer haben das Buch gekauft .": main(
        np("man", plural=True), "buy", tense="past", obj=BOOK
    ),
    "the man gives the woman the book . | der Mann gibt der Frau das Buch .": main(
        MAN, "give", obj=BOOK, recipient=WOMAN
    ),
    "the man gives the book to the woman . | der Mann gibt der Frau das Buch .": main(
        MAN, "give", obj=BOOK, recipient=WOMAN, recipient_last=True
    ),
    "the man will send her a letter . | der Mann wird ihr einen Brief schicken .": main(
        MAN, "send", tense="future", obj=np("letter", "a"), recipient=SHE
    ),
    "the woman listens to the child . | die Frau hört dem Kind zu .": main(WOMAN, "listen to", obj=np("child")),
    "the man does not see the dog in the garden . | der Mann sieht den Hund nicht im Garten .": main(
        MAN, "see", negated=True, obj=DOG, place=IN_GARDEN
    ),
    "the man does not see a dog . | der Mann sieht keinen Hund .": main(MAN, "see", negated=True, obj=np("dog", "a")),
    "the man did not open the door . | der Mann hat die Tür nicht aufgemacht .": main(
        MAN, "open", negated=True, tense="past", obj=DOOR
    ),
    "the door is not big . | die Tür ist nicht groß .": main(DOOR, "be", negated=True, predicate="big"),
}

SMALL_DOGS = np("dog", "many", "small", plural=True)
NOUNS = {
    "the small dog sleeps . | der kleine Hund schläft .": main(np("dog", "the", "small"), "sleep"),
    "a small dog sleeps . | ein kleiner Hund schläft .": main(np("dog", "a", "small"), "sleep"),
    "the man sees the small dog . | der Mann sieht den kleinen Hund .": main(MAN, "see", obj=np("dog", "the", "small")),
    "the man helps a small dog . | der Mann hilft einem kleinen Hund .": main(MAN, "help", obj=np("dog", "a", "small")),
    "the man sees my old horse . | der Mann sieht mein altes Pferd .": main(MAN, "see", obj=np("horse", "my", "old")),
    "the man helps his small cat . | der Mann hilft seiner kleinen Katze .": main(
        MAN, "help", obj=np("cat", "his", "small")
    ),
    "many small dogs see many small dogs . | viele kleine Hunde sehen viele kleine Hunde .": main(
        SMALL_DOGS, "see", obj=SMALL_DOGS
    ),
    "the man follows many small dogs . | der Mann folgt vielen kleinen Hunden .": main(MAN, "follow", obj=SMALL_DOGS),
    "this boy sees this boy . | dieser Junge sieht diesen Jungen .": main(
        np("boy", "this"), "see", obj=np("boy", "this")
    ),
    "the man can carry the kitchen table . | der Mann kann den Küchentisch tragen .": main(
        MAN, "carry", tense="can", obj=np("kitchen table")
    ),
    "the man closes the garden door . | der Mann macht die Gartentür zu .": main(MAN, "close", obj=np("garden door")),
    "the man and the woman wait behind an old house . | der Mann und die Frau warten hinter einem alten Haus .": main(
        np("man", conjunct=WOMAN), "wait", place=PP("behind", np("house", "a", "old"))
    ),
    "the dog that sees the cat sleeps . | der Hund , der die Katze sieht , schläft .": main(
        that("dog", "subject", clause(GAP, "see", obj=CAT)), "sleep"
    ),
    "the dog that the cat sees sleeps . | der Hund , den die Katze sieht , schläft .": main(
        that("dog", "object", clause(CAT, "see", obj=GAP)), "sleep"
    ),
    "the woman who the man helps sleeps . | die Frau , der der Mann hilft , schläft .": main(
        that("woman", "object", clause(MAN, "help", obj=GAP)), "sleep"
    ),
    "the man sees the children who sleep . | der Mann sieht die Kinder , die schlafen .": main(
        MAN, "see", obj=that("child", "subject", clause(GAPS, "sleep"), plural=True)
    ),
    "the man has visited the house in which she worked . | "
    "der Mann hat das Haus , in dem sie gearbeitet hat , besucht .": main(
        MAN, "visit", tense="perfect", obj=that("house", "place", clause(SHE, "work", tense="past"))
    ),
}


@pytest.mark.parametrize(("said", "sentence"), (ORDER | VERBS | NOUNS).items(), ids=lambda value: str(value)[:40])
def test_translation(said: str, sentence: Sentence) -> None:
    assert " | ".join(translate(sentence)) == said


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build(seed=3, **SIZES)


def test_same_seed_same_corpus(corpus: Corpus) -> None:
    assert build(seed=3, **SIZES) == corpus
    assert build(seed=4, train=50, valid=0, test=0, test_long=0)["train"] != corpus["train"][:50]


def test_known_stream() -> None:
    """The corpus of a seed does not change from one Python to another."""
    sampler = Sampler(1)
    drawn = [translate(sampler.sentence())[0] for _ in range(3)]
    assert drawn == KNOWN


def test_sizes_and_distinct_pairs(corpus: Corpus) -> None:
    assert {split: len(pairs) for split, pairs in corpus.items()} == SIZES
    for pairs in corpus.values():
        assert len(set(pairs)) == len(pairs)
        assert len({en for en, _ in pairs}) == len(pairs)


@pytest.mark.parametrize("side", [0, 1])
def test_splits_share_no_sentence_and_the_long_are_longer_than_all_training(corpus: Corpus, side: int) -> None:
    splits = {name: [pair[side] for pair in pairs] for name, pairs in corpus.items()}
    assert len(set().union(*splits.values())) == sum(len(set(sentences)) for sentences in splits.values())
    lengths = {name: [len(sentence.split()) for sentence in sentences] for name, sentences in splits.items()}
    assert min(lengths["test_long"]) > max(lengths["train"])


def test_held_out_words_occur_in_training(corpus: Corpus) -> None:
    words = {word for pair in corpus["train"] for side in pair for word in side.split()}
    for split in ("valid", "test", "test_long"):
        assert {word for pair in corpus[split] for side in pair for word in side.split()} <= words


def test_vocabulary_and_lengths(corpus: Corpus) -> None:
    for side in (0, 1):
        sentences = [pair[side].split() for pair in corpus["train"]]
        counts = Counter(word for sentence in sentences for word in sentence)
        assert 200 <= len(counts) <= 400
        assert 10 <= sum(map(len, sentences)) / len(sentences) <= 14


@pytest.mark.parametrize("long", [False, True])
def test_one_translation_for_each_sentence(long: bool) -> None:
    sampler = Sampler(5, long)
    translations: dict[str, str] = {}
    for _ in range(800 if long else 5000):
        en, de = translate(sampler.sentence())
        assert translations.setdefault(en, de) == de
        assert " , ." not in de and " , ," not in de and "  " not in en + de


def test_order_matters() -> None:
    """Who sees whom is said by the order alone: nouns meet as subject and object both ways."""
    sampler, pairs = Sampler(6), set()
    for _ in range(5000):
        main = sampler.sentence().main
        if main.obj is not None and main.obj.noun and main.subject.noun:
            pairs.add((main.subject.noun.en, main.obj.noun.en))
    assert sum((b, a) in pairs for a, b in pairs if a != b) > 100


def test_too_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relpos_fairseq.lab.toy.corpus._MAX_DRAWS_PER_PAIR", 2)
    with pytest.raises(GrammarError, match="ask for fewer"):
        build(seed=1, train=1, valid=50, test=1, test_long=1)


def test_write(corpus: Corpus, tmp_path: Path) -> None:
    write(corpus, tmp_path / "a")
    names = {f"{split}.{side}" for split in SIZES for side in ("en", "de")}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    lines = (tmp_path / "a" / "test.de").read_bytes().decode("utf-8").splitlines()
    assert lines == [de for _, de in corpus["test"]]


def test_failed_write_leaves_old_files(corpus: Corpus, tmp_path: Path) -> None:
    old = tmp_path / "train.en"
    old.write_text("old\n")
    with pytest.raises(TypeError):
        write({"train": corpus["train"], "valid": [(1, 2)]}, tmp_path)  # type: ignore
    assert old.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [old]


SMALL = "--train 300 --valid 5 --test 5 --test-long 2"


def test_command(tmp_path: Path, shell: Shell) -> None:
    cells = [line.strip("| ").split(" | ") for line in shell(f"corpus --out . --seed 2 {SMALL}").splitlines()]
    header, _, *rows = [[cell.strip() for cell in line] for line in cells]
    assert header == ["file", "pairs", "tokens", "longest", "words"]
    assert rows[0][:2] == ["train.en", "300"] and len(rows) == 8
    expected = build(2, 300, 5, 5, 2)
    assert (tmp_path / "train.de").read_text("utf-8").splitlines() == [de for _, de in expected["train"]]


@pytest.mark.parametrize(
    ("line", "said"),
    {
        "--out . --train 0": "--train must be >= 1, got 0",
        "--out . --train x": "argument --train: must be a whole number",
        "--out . --seed -1": "--seed must be >= 0, got -1",
        "--out . --test-long -3": "--test-long must be >= 1, got -3",
        "--out . --none 1": "unrecognized arguments: --none 1",
        f"--out train.en {SMALL}": "--out train.en is a file",
    }.items(),
)
def test_bad_arguments(line: str, said: str, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "train.en").write_text("old\n")
    assert said in shell.refused(f"corpus {line}")
    assert (tmp_path / "train.en").read_text() == "old\n"
