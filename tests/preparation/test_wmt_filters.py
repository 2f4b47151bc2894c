"""The filters of prepare wmt: any language, a switch and examples for each, and none that takes nearly everything."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import ROOT
from helpers.folders import contents, prepare_status
from relpos_fairseq.preparation import cleaning, parallel_text
from relpos_fairseq.preparation import wmt as stages
from relpos_fairseq.preparation.cleaning import REASONS, Cleaner, Filter
from relpos_fairseq.preparation.lengths import CHARACTERS, WORDS, Lengths, measure_lengths
from relpos_fairseq.preparation.parallel_text import LONGEST_SIDE, Chunk, Text
from relpos_fairseq.preparation.wmt_settings import DUPLICATE, FILTERS, NO_FILTER, Limits
from relpos_fairseq.text.languages import find_language

# The same twelve words.
WORDS_OF = {
    "en": "house tree sees old man dog new day walks garden child water",
    "th": "บ้าน ต้นไม้ เห็น แก่ ผู้ชาย หมา ใหม่ วัน เดิน สวน เด็ก น้ำ",
    "ja": "家 木 見る 古い 男 犬 新しい 日 歩く 庭 子供 水",
    "zh_CN": "房子 树 看见 老 男人 狗 新 天 走 花园 孩子 水",
    "kk": "үй ағаш көреді ескі ер ит жаңа күн жүреді бақ бала су",
    "ta": "வீடு மரம் பார்க்கிறது பழைய மனிதன் நாய் புதிய நாள் நடக்கிறது தோட்டம் குழந்தை தண்ணீர்",
    "ru_RU": "дом дерево видит старый мужчина собака новый день идёт сад ребёнок вода",
    "rus_Cyrl": "дом дерево видит старый мужчина собака новый день идёт сад ребёнок вода",
    "sr": "kuća drvo vidi star čovek pas nov dan hoda bašta dete voda",
    "qqq": "ᎠᏓᏁᎸ ᏡᎬ ᎠᎪᏩᏘᎭ ᎤᏪᏘ ᎠᏍᎦᏯ ᎩᏟ ᎢᏤ ᎢᎦ ᎠᎢ ᎠᏫᏒ ᎠᏲᎵ ᎠᎹ",  # a code of nobody's
}
Sides = dict[str, list[str]]


def sentences(pair: str, count: int, seed: int = 1) -> Sides:
    """Make pairs of sentences, word for word, with the spaces that their languages write."""
    draw, made = random.Random(seed), {language: [] for language in pair.split("-")}
    for _ in range(count):
        chosen = [draw.randrange(12) for _ in range(draw.randint(3, 14))]
        for language, lines in made.items():
            space = " " if find_language(language).has_spaces else ""
            lines.append(space.join(WORDS_OF[language].split()[number] for number in chosen))
    return made


def write(folder: Path, train: Sides, held_out: Sides | None = None) -> Path:
    """Write a folder for --from-dir."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = held_out or {language: [f"{number} {language}" for number in range(3)] for language in train}
    for split, sides in (("train", train), ("valid", held_out), ("test", held_out)):
        for language, lines in sides.items():
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def prepare(folder: Path, out: Path, pair: str, *options: str) -> int:
    small = ["--vocab-size", "40", "--workers", "1", "--bpe", "subword-nmt", "--tokenizer", "none"]
    return prepare_status("wmt", [pair, "--from-dir", folder, "--out", out, *small, *options])


def counts_of(folder: Path, out: Path, pair: str, *options: str) -> dict[str, int]:
    """Clean the training text, and no more; return the numbers of pairs by reason."""
    assert prepare(folder, out, pair, "--shard", "1/1", *options) == 0
    manifest = json.loads((out / "shards" / "1-of-1" / "manifest.json").read_text())
    return {reason: counts[0] for reason, counts in manifest["stages"]["clean"]["train"].items()}


def examples(out: Path, shard: str = "1-of-1") -> dict[str, dict[str, list]]:
    return json.loads((out / "shards" / shard / "dropped.json").read_text(encoding="utf-8"))


def error(capsys) -> str:
    """The one line of an error."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture
def quick(monkeypatch):
    """Small chunks."""
    monkeypatch.setattr(parallel_text, "LINES", 7)


# Languages


@pytest.mark.parametrize("pair", ["en-zh", "zh-en", "en-ar", "en-de", "zh-ar"])
def test_real_questions_are_kept(shared_data, tmp_path, pair):
    train = {}
    for language in pair.split("-"):
        path = shared_data / "squad" / f"xquad.{language}.json.gz"
        if not path.is_file():
            pytest.skip(f"no real text: {path} is absent")
        articles = json.loads(gzip.decompress(path.read_bytes()))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        train[language] = [asked["question"].strip() for paragraph in paragraphs for asked in paragraph["qas"]]
    counts = counts_of(write(tmp_path / "text", train), tmp_path / "out", pair)
    assert counts["read"] > 1000 and counts["kept"] >= 0.95 * counts["read"], counts


@pytest.mark.parametrize("pair", [*(f"en-{other}" for other in WORDS_OF if other != "en"), "ja-en", "zh_CN-th"])
def test_text_of_any_language_is_kept(tmp_path, pair):
    folder = write(tmp_path / "text", sentences(pair, 120))
    assert counts_of(folder, tmp_path / "out", pair) == {"read": 120, "kept": 120}


@pytest.mark.parametrize("pair", ["en-zh_CN", "th-en", "zh_CN-th"])
def test_what_is_no_translation_is_dropped(tmp_path, pair):
    train = sentences(pair, 120)
    one, other = train
    train[one][5], train[other][5] = train[one][5][:2], train[other][5] * 5  # one side's beginning
    train[one][7] = train[other][7] = "1234 1234 1234"
    train[one][9], train[other][9] = " ".join(WORDS_OF[one].split()[:3]), "слово текст"
    folder = write(tmp_path / "text", train)
    counts = counts_of(folder, tmp_path / "out", pair)
    assert counts == {"read": 120, "kept": 117, "length ratio": 1, "identical sides": 1, "wrong script": 1}


def measured(folder: Path, pair: str, train: Sides) -> Lengths:
    write(folder, train)
    languages = tuple(pair.split("-"))
    text = Text("train", tuple(folder / f"train.{language}" for language in languages))
    return measure_lengths([text], languages, (str, str))


def test_lengths_by_hand(tmp_path):
    train = {"en": ["one two three", "four", "", "x"], "zh": ["一二三 四五", "六", "七八九", ""]}
    assert measured(tmp_path, "en-zh", train) == Lengths((WORDS, CHARACTERS), (1.0, 6 / 4))
    assert measured(tmp_path, "zh-en", train) == Lengths((CHARACTERS, WORDS), (6 / 4, 1.0))
    train["th"] = ["กขค งจฉ", "กข", "ก", "ก"]
    assert measured(tmp_path, "zh-th", train) == Lengths((CHARACTERS, CHARACTERS), (1.0, 9 / 9))
    lengths = Lengths((CHARACTERS, CHARACTERS), (1.0, 2.0))
    assert lengths.compared_in == CHARACTERS and lengths.compared("一 二", "กขคง") == (2, 2)
    assert lengths.counts("一 二", "") == (2, 0) and Lengths().counts("a b", "") == (2, 0)
    assert Filter("zh", "th", Limits(max_words=2), lengths=lengths)("一" * 24, "ก" * 24) is None
    assert Filter("zh", "th", Limits(max_words=2), lengths=lengths)("一" * 25, "ก" * 24) == "too long"


def test_only_the_first_pairs_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("relpos_fairseq.preparation.lengths.MEASURED", 1)
    train = {"en": ["a b", "c"], "zh": ["一二三", "一二三四五六七八九"]}
    assert measured(tmp_path, "en-zh", train).scales == (1.0, 1.5)


@pytest.mark.parametrize("language", ["zh_CN", "ja", "th"])
def test_text_that_was_cut_into_words_is_counted_in_words(tmp_path, language):
    train = sentences(f"en-{language}", 50)
    assert measured(tmp_path, f"en-{language}", train).units == (WORDS, CHARACTERS)
    draw, words = random.Random(2), WORDS_OF[language].split()
    train[language] = [" ".join(draw.choices(words, k=len(line.split()))) + " 。" for line in train["en"]]
    assert measured(tmp_path, f"en-{language}", train) == Lengths()
    train[language] = [" ".join("".join(draw.choices(words, k=7)) for _ in "12") for _ in train["en"]]  # phrases
    assert measured(tmp_path, f"en-{language}", train).units == (WORDS, CHARACTERS)
    train[language] = [f"{words[0]} Python {words[1]} API" for _ in train["en"]]
    assert measured(tmp_path, f"en-{language}", train).units == (WORDS, CHARACTERS)


def test_no_language_with_spaces_is_measured():
    unread = Text("train", (Path("nowhere.ru"), Path("nowhere.qqq")))
    assert measure_lengths([unread], ("ru", "qqq"), (str, str)) == Lengths()


def test_the_table_says_what_is_counted(tmp_path, capsys, quick):
    folder = write(tmp_path / "text", sentences("en-zh_CN", 60))
    assert prepare(folder, tmp_path / "out", "en-zh_CN") == 0
    said = capsys.readouterr().out
    assert "en words" in said and "zh_CN characters" in said and "zh_CN words" not in said
    lines = (folder / "train.zh_CN").read_text(encoding="utf-8").splitlines()
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["stages"]["clean"]["train"]["kept"]
    assert counts == [60, sum(len(line.split()) for line in (folder / "train.en").open()), sum(map(len, lines))]


# Switches

# For each filter a pair that it alone drops.
ALONE = {
    "empty": ("", "eins"),
    "too long": ("w " * 251, "v " * 251),
    "length ratio": ("a b c d e f g h i", "eins"),
    "identical sides": ("Same words", "same words"),
    "wrong script": ("какой то текст", "irgend ein Text"),
    "in a test set": ("1 en", "etwas"),
}
BITS = ["", "a", "b c", "Ä", "ж", "д ф", "В", "中文", "held out", "12", "w " * 30, "v" * 300]
any_line = st.lists(st.sampled_from(BITS), max_size=4).map(
    lambda bits: " ".join("".join(f"{b} " for b in bits).split())
)


def english_german(no_filter: tuple[str, ...], tuned: Lengths | None = None) -> Filter:
    limits = Limits(max_words=20, no_filter=[name for name, reason in NO_FILTER.items() if reason in no_filter])
    return Filter("en", "de", limits, {"held out", "12"}, tuned)


@settings(max_examples=150, deadline=None)
@given(source=any_line, target=any_line, off=st.sets(st.sampled_from(REASONS)))
def test_what_is_switched_off_is_not_tried(source, target, off):
    """The reason is the first of those that apply alone and are not switched off."""
    alone = [english_german(tuple(set(REASONS) - {reason}))(source, target) for reason in REASONS]
    assert all(found in (None, reason) for found, reason in zip(alone, REASONS, strict=True))
    expected = next((found for found in alone if found and found not in off), None)
    assert english_german(tuple(off))(source, target) == expected


def test_every_filter_has_a_pair():
    assert (*ALONE, DUPLICATE) == tuple(FILTERS) == tuple(NO_FILTER.values())


@pytest.mark.parametrize("reason", ALONE)
def test_a_pair_that_one_filter_drops_is_kept_without_it(tmp_path, reason, quick):
    train = {"en": [f"line {n} of text" for n in range(20)], "de": [f"Zeile {n} des Textes" for n in range(20)]}
    for side, line in zip(train.values(), ALONE[reason], strict=True):
        side[4] = line.strip()
    folder = write(tmp_path / "text", train)
    assert counts_of(folder, tmp_path / "out", "en-de") == {"read": 20, "kept": 19, reason: 1}
    assert [pair[0] for pair in examples(tmp_path / "out")["train"][reason]] == [5]
    off = ("--no-filter", reason.replace(" ", "-"))
    assert counts_of(folder, tmp_path / "out", "en-de", *off) == {"read": 20, "kept": 20}
    assert examples(tmp_path / "out") == {"train": {}}
    assert prepare(folder, tmp_path / "out", "en-de", *off) == 0
    for language, lines in train.items():
        assert (tmp_path / "out" / "text" / f"train.{language}").read_text().split("\n")[:-1] == lines


def test_identical_sides_and_repetitions_can_be_kept(tmp_path, capsys, quick):
    """Grammar correction and paraphrases: most lines need no change, and many come again."""
    train = {"bad": [f"a sentence {n // 3}" for n in range(60)]}
    train["good"] = [f"{line} mended" if n % 10 == 0 else line for n, line in enumerate(train["bad"])]
    folder, out = write(tmp_path / "text", train), tmp_path / "out"
    assert prepare(folder, out, "bad-good") == 2
    assert 'the filter "identical sides" drops 54 of 60 pairs' in error(capsys)
    assert prepare(folder, out, "bad-good", "--no-filter", "identical-sides") == 2
    assert 'the filter "duplicate" drops 34 of 60 pairs' in error(capsys)
    assert prepare(folder, out, "bad-good", "--no-filter", "identical-sides", "duplicate") == 0
    assert "duplicate" not in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["stages"]["merge"]["kept"][0] == 60
    assert manifest["settings"]["limits"]["no_filter"] == ["identical sides"]
    assert manifest["settings"]["duplicates"] == "kept"


def test_a_line_that_was_read_in_part_is_never_kept():
    off = Filter("en", "de", Limits(no_filter=["too-long", "length-ratio", "wrong-script"]))
    clean = Cleaner((str, str), off, "fail")
    for character in ("x", "é", "中", "😀"):
        cut = (character.encode() * LONGEST_SIDE)[: LONGEST_SIDE + 1]
        text = Text("t", (Path("t.en"), Path("t.de")))
        found = clean(Chunk(text, (1, 2), b"y\n" + cut, "é y\n12".encode()))
        assert found.counts["kept"][0] == 1 and found.counts["too long"][0] == 1, character


# Examples


def odd_text() -> Sides:
    """Ninety pairs, of which every third is dropped for one of three reasons."""
    train = {"en": [f"line {n} of text" for n in range(90)], "de": [f"Zeile {n} des Textes" for n in range(90)]}
    for number in range(0, 90, 3):
        odd = [("\x07" * 61, "x"), ("x\u0085y|z\u202e\x07", "i" * 4000), ("gleich", "Gleich")][number // 3 % 3]
        train["en"][number], train["de"][number] = odd
    return train


def test_examples_are_the_first_of_each_reason(tmp_path, capsys, quick):
    folder, out = write(tmp_path / "text", odd_text()), tmp_path / "out"
    assert prepare(folder, out, "en-de") == 0
    long = ["x\\x85y|z\\u202e\\x07", "i" * 59 + "…"]
    expected = {
        "empty": [[number, "\\x07" * 59 + "…", "x"] for number in (1, 10, 19)],
        "too long": [[number, *long] for number in (4, 13, 22)],
        "identical sides": [[number, "gleich", "Gleich"] for number in (7, 16, 25)],
    }
    assert examples(out) == {"train": expected}
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in capsys.readouterr().out.splitlines()]
    shown = [row[1:-1] for row in rows if len(row) == 7 and row[2] == "train"]
    assert shown == [
        [reason, "train", str(number), source.replace("|", "\\|"), target]
        for reason in REASONS
        for number, source, target in expected.get(reason, [])
    ]


@pytest.mark.parametrize("workers", ["2", "3"])
def test_examples_do_not_depend_on_workers(tmp_path, quick, workers):
    folder = write(tmp_path / "text", odd_text())
    for number in ("1", workers):
        counts_of(folder, tmp_path / number, "en-de", "--workers", number)
    assert contents(tmp_path / "1", ".stages") == contents(tmp_path / workers, ".stages")


def tables(capsys) -> str:
    return capsys.readouterr().out.partition("| training text")[2].partition(str(Path("data-bin")))[0]


@pytest.mark.parametrize("pair", ["en-de", "en-zh_CN"])
def test_shards_are_the_whole(tmp_path, capsys, quick, pair):
    train = odd_text() if pair == "en-de" else sentences(pair, 90)
    train["en"][50] = "mail " * 60
    folder, whole, parts = write(tmp_path / "text", train), tmp_path / "whole", tmp_path / "parts"
    assert prepare(folder, whole, pair) == 0
    said = tables(capsys)
    for shard in (3, 1, 2):
        assert prepare(folder, parts, pair, "--shard", f"{shard}/3", "--workers", "2") == 0
    capsys.readouterr()
    assert prepare(folder, parts, pair, "--merge", "3") == 0
    assert tables(capsys).replace(str(parts), str(whole)) == said and "mail" in said
    assert contents(parts / "text") == contents(whole / "text")
    assert (parts / "shards" / "lengths.json").read_bytes() == (whole / "shards" / "lengths.json").read_bytes()
    (parts / "shards" / "2-of-3" / "dropped.json").write_text("{}")
    assert prepare(folder, parts, pair, "--merge", "3") == 2
    assert "run --shard 2/3 again" in error(capsys)


def test_bytes_that_are_no_text_are_shown_as_escapes(tmp_path):
    folder = write(tmp_path / "text", sentences("en-kk", 30))
    lines = (folder / "train.kk").read_bytes().split(b"\n")
    lines[8] = b"caf\xe9\x1b[2J"
    (folder / "train.kk").write_bytes(b"\n".join(lines))
    assert counts_of(folder, tmp_path / "out", "en-kk", "--on-bad-line", "drop")["invalid UTF-8"] == 1
    ((number, _, target),) = examples(tmp_path / "out")["train"][cleaning.INVALID]
    assert (number, target) == (9, r"caf\xe9\x1b[2J")


# Nearly everything


def half(count: int, dropped: int) -> Sides:
    """Make pairs, the last of which are the same on both sides."""
    train = {"en": [f"line {n} of text" for n in range(count)], "de": [f"Zeile {n} des Textes" for n in range(count)]}
    train["de"][count - dropped :] = train["en"][count - dropped :]
    return train


def test_more_than_half_is_an_error_that_names_the_ways_on(tmp_path, capsys):
    folder, out = write(tmp_path / "text", half(40, 21)), tmp_path / "out"
    assert prepare(folder, out, "en-de", "--shard", "1/1") == 2
    assert error(capsys) == (
        'error: train: the filter "identical sides" drops 21 of 40 pairs, such as line 20, "line 19 of text" with '
        '"line 19 of text": --no-filter identical-sides keeps such pairs, --max-dropped 1 drops them all the same'
    )
    assert counts_of(folder, out, "en-de", "--max-dropped", "1")["kept"] == 19
    assert counts_of(folder, out, "en-de", "--no-filter", "identical-sides")["kept"] == 40
    assert prepare(folder, out, "en-de", "--shard", "1/1", "--max-dropped", "0.5") == 2
    assert counts_of(write(folder, half(40, 20)), out, "en-de")["kept"] == 20
    assert prepare(folder, out, "en-de", "--shard", "1/1", "--max-dropped", "0.49") == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_each_corpus_is_looked_at_alone(tmp_path, workers):
    before, texts = set(multiprocessing.active_children()), []
    for name, train in (("good", half(60, 0)), ("bad", half(20, 11)), ("small", half(19, 19))):
        folder = write(tmp_path / name, train)
        texts.append((Text(name, (folder / "train.en", folder / "train.de")), len(train["en"])))

    def clean(**limits) -> dict:
        cleaner = Cleaner((str, str), Filter("en", "de", Limits(**limits)), "fail")
        outputs = [tmp_path / name for name in "abcd"]
        return cleaning.clean_shard(texts, cleaner, outputs[:3], outputs[3], **whole)

    whole = {"workers": workers, "sample": None, "seed": 1, "shard": (1, 1)}
    with pytest.raises(cleaning.UserError, match='^bad: the filter "identical sides" drops 11 of 20 pairs'):
        clean()
    assert set(multiprocessing.active_children()) == before
    assert not [name for name in "abcd" if (tmp_path / name).exists()]
    counts = clean(max_dropped=0.55)
    assert {name: found.get("kept", [0])[0] for name, found in counts.items()} == {"good": 60, "bad": 9, "small": 0}
    assert sorted(json.loads((tmp_path / "d").read_text())) == ["bad", "good", "small"]


def test_of_few_pairs_nothing_left_is_the_error(tmp_path, capsys, quick):
    folder = write(tmp_path / "text", half(19, 18))
    assert prepare(folder, tmp_path / "out", "en-de") == 0
    assert prepare(write(folder, half(19, 19)), tmp_path / "out", "en-de") == 2
    said = error(capsys)
    assert "no training pair is left after filtering (read 19, identical sides 19)" in said
    assert said.endswith(": --no-filter identical-sides keeps such pairs")


def test_shards_that_were_checked_are_joined_whatever_share_is_asked_for(tmp_path, capsys, quick):
    train = half(60, 0)
    for lines in train.values():
        lines[20:] = [lines[0]] * 40
    folder, out = write(tmp_path / "text", train), tmp_path / "out"
    for shard in ("1/2", "2/2"):
        assert prepare(folder, out, "en-de", "--shard", shard) == 0
    capsys.readouterr()
    assert prepare(folder, out, "en-de", "--merge", "2") == 2
    assert error(capsys).startswith(
        'error: all corpora, joined: the filter "duplicate" drops 40 of 60 pairs, such as line 21, "line 0 of text"'
    )
    assert prepare(folder, out, "en-de", "--merge", "2", "--max-dropped", "1") == 0
    assert (out / "text" / "train.en").read_text() == "".join(f"line {n} of text\n" for n in range(20))
    assert prepare(folder, out, "en-de", "--merge", "2", "--no-filter", "duplicate") == 0
    assert (out / "text" / "train.de").read_text().split("\n")[:-1] == train["de"]


# Again


def ran(capsys) -> list[str]:
    """The stages that did not say `unchanged`."""
    lines = re.findall(r"^\[\d+/\d+\] ([\w-]+) \.\.\. (\w+)", capsys.readouterr().out, re.M)
    return [name for name, how in lines if how != "unchanged"]


def test_a_changed_switch_runs_what_depends_on_it(tmp_path, capsys, quick):
    folder, out = write(tmp_path / "text", half(40, 5)), tmp_path / "out"
    assert prepare(folder, out, "en-de") == 0
    before = contents(out, ".stages")
    assert ran(capsys)[:4] == ["count", "held-out", "clean", "merge"]
    assert prepare(folder, out, "en-de") == 0
    assert ran(capsys) == []
    assert prepare(folder, out, "en-de", "--no-filter", "duplicate") == 0
    assert ran(capsys) == ["merge"]  # there are none
    assert prepare(folder, out, "en-de", "--no-filter", "identical-sides", "duplicate") == 0
    assert ran(capsys)[:3] == ["clean", "merge", "sample"]
    (out / "shards" / "1-of-1" / "dropped.json").unlink()
    assert prepare(folder, out, "en-de") == 0
    assert ran(capsys)[:3] == ["clean", "merge", "sample"]
    assert contents(out, ".stages") == before


def test_a_run_that_was_stopped_goes_on(tmp_path, capsys, quick, monkeypatch):
    folder, out = write(tmp_path / "text", odd_text()), tmp_path / "out"
    assert prepare(folder, tmp_path / "whole", "en-de") == 0

    def stop(steps: int, function: Callable) -> Callable:
        left = iter(range(steps))

        def stopped(*arguments):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return function(*arguments)

        return stopped

    for owner, name, steps in ((cleaning, "add_examples", 9), (cleaning, "write_json", 0), (stages, "write_json", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, stop(steps, getattr(owner, name)))
            assert prepare(folder, out, "en-de", *(["--force"] if owner is stages else [])) == 130
    assert prepare(folder, out, "en-de") == 0
    assert contents(out, ".stages") == contents(tmp_path / "whole", ".stages")


def test_the_page_lists_the_filters():
    page = (ROOT / "relpos_fairseq" / "preparation" / "README.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {FILTERS[reason]} |" for name, reason in NO_FILTER.items()]
    assert "\n".join(rows) in page
