"""Tasks: their data against the papers' own facts, and exact match against fairseq's generator."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from relpos_fairseq.lab.comparison.scores import METRICS
from relpos_fairseq.lab.comparison.tasks import classification, memory
from relpos_fairseq.lab.comparison.tasks.encoder_decoder import scan_commands
from relpos_fairseq.lab.comparison.tasks.registry import make_task

NO_FLAGS = {"train": {}, "generate": {}}


def task(kind: str, **options):
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return make_task("one", {"kind": kind, **given}, NO_FLAGS)


def test_scan_is_the_published_set():
    """Counts of Lake and Baroni 2018, and lines of their tasks.txt and length split."""
    every = scan_commands()
    assert len(every) == 20910
    lengths = Counter(map(len, every.values()))
    assert max(lengths) == 48 and min(lengths) == 1
    assert sum(n for length, n in lengths.items() if length <= 22) == 16990
    assert sum(n for length, n in lengths.items() if length >= 24) == 3920
    assert Counter(word for command in every for word in command.split()).keys() == set(
        "walk look run jump turn left right opposite around twice thrice and after".split()
    )
    around = "I_TURN_RIGHT I_JUMP " * 4
    for command, actions in {
        "jump opposite right thrice": "I_TURN_RIGHT I_TURN_RIGHT I_JUMP " * 3,
        "turn right twice and turn opposite right": "I_TURN_RIGHT " * 4,
        "run opposite left after walk right": "I_TURN_RIGHT I_WALK I_TURN_LEFT I_TURN_LEFT I_RUN",
        "jump around right after look": f"I_LOOK {around}",
        "turn around left": "I_TURN_LEFT " * 4,
    }.items():
        assert every[command] == actions.split(), command


@pytest.mark.parametrize("cutoff", [22, 26, 40])
def test_scan_splits_by_length(cutoff):
    pairs = task("scan", cutoff=cutoff, valid=100).pairs()
    assert sum(map(len, pairs.values())) == 20910
    sources = [source for some in pairs.values() for source, _ in some]
    assert len(set(sources)) == 20910
    for name, some in pairs.items():
        longer = {len(actions.split()) > cutoff for _, actions in some}
        assert longer == {name == "longer"}
    assert len(task("scan", cutoff=cutoff, test=50).pairs()["longer"]) == 50


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("copy", {}, lambda prompt: prompt),
        ("reverse", {}, lambda prompt: prompt[::-1]),
        ("power", {"answers": "b"}, lambda prompt: ["b"] * len(prompt)),
        ("power", {"answers": "a a"}, lambda prompt: ["a"] * (2 * len(prompt))),
    ],
)
def test_prompts_and_answers(kind, options, expected):
    made = task(kind, longest=5, beyond=9, examples=300, each=3, symbols=4, **options).lines()
    each = 1 if kind == "power" else 3  # a^n is one prompt of each length
    assert len(made["train"]) == 300 and len(made["inside"]) == 5 * each and len(made["longer"]) == 4 * each
    assert all(len(set(made[name])) == len(made[name]) for name in ("valid", "inside", "longer"))
    for name, lines in made.items():
        lengths = set()
        for line in lines:
            prompt, answer = (part.split() for part in line.split(">"))
            assert answer == expected(prompt)
            lengths.add(len(prompt))
        assert lengths == (set(range(6, 10)) if name == "longer" else set(range(1, 6)))


def test_labels():
    generator = random.Random(3)
    even, missing = task("even_pairs"), task("missing_duplicate")
    for length in [*range(2, 30)] * 5:
        sequence, label = even.example(length, generator)
        joined = "".join(sequence)
        odd = sum(joined[n : n + 2] in ("ab", "ba") for n in range(length)) % 2
        assert len(sequence) == length and label == str(odd) == str(int(joined[0] != joined[-1]))
        sequence, label = missing.example(length, generator)
        half = len(sequence) // 2
        assert half == length // 2 and sequence.count("?") == 1
        place = sequence.index("?")
        assert label == sequence[(place + half) % (2 * half)]


def test_published_files(tmp_path):
    for name in ("train", "dev", "test", "gen"):
        (tmp_path / f"{name}.tsv").write_text(f"A {name} ran .\trun ( x _ 1 )\tprimitive\n")
    pairs = task("cogs", data=tmp_path).pairs()
    assert pairs["gen"] == [("A gen ran .", "run ( x _ 1 )")] and pairs["valid"][0][0] == "A dev ran ."
    (tmp_path / "gen.tsv").write_text("A gen ran .\trun\n")
    with pytest.raises(ValueError, match="gen.tsv, line 1: 2 columns, COGS has 3"):
        task("cogs", data=tmp_path).pairs()
    for name, count in (("train", 30), ("test", 4)):
        lines = [f"copy {n} , {n}" for n in range(count)]
        (tmp_path / f"{name}.src").write_text("\n".join(lines) + "\n")
        (tmp_path / f"{name}.tgt").write_text("\n".join(lines) + "\n")
    pairs = task("pcfg_set", data=tmp_path, test=3).pairs()
    assert {name: len(some) for name, some in pairs.items()} == {"train": 27, "valid": 3, "test": 3}
    with pytest.raises(ValueError, match="one needs what is not there: .*train.tsv"):
        task("cogs", data=tmp_path / "none").data_folder(tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("scam", {}, "there is no kind 'scam'; known: "),
        ("scan", {"cut": 3}, "kind scan has no cut; known: cutoff, valid, test"),
        ("scan", {"cutoff": 48}, "cutoff must be 1 to 47"),
        ("copy", {"beyond": 20}, "beyond must be above longest, 20, got 20"),
        ("even_pairs", {"longest": 300}, "longest must be 2 to beyond"),
        ("characters", {"context": 1}, "context must be >= 2"),
        ("copy", {"each": 0}, "each is 0, and must be a whole number from 1"),
        ("scan", {"test": -1}, "test is -1, and must be a whole number from 0"),
    ],
)
def test_wrong_options(kind, options, said):
    with pytest.raises(ValueError, match=said):
        task(kind, **options)


def test_data_are_named_by_what_they_are_made_of(tmp_path):
    """Options, files' contents; not labels, flags or places."""
    one = task("copy", symbols=5)
    other = make_task("two", {"kind": "copy", "symbols": 5, "train": {"lr": 1}}, NO_FLAGS)
    assert one.data_key == other.data_key != task("copy", symbols=6).data_key
    (tmp_path / "text").write_text("ab\n")
    (tmp_path / "same").write_text("ab\n")
    keys = [task("characters", text=tmp_path / name).data_key for name in ("text", "same")]
    (tmp_path / "same").write_text("abc\n")
    assert keys[0] == keys[1] != task("characters", text=tmp_path / "same").data_key


@pytest.mark.parametrize(("language", "named"), [("de", {}), ("qaa", {}), ("zh", {"tokenize": "zh"})])
def test_bleu_is_that_of_the_targets_language(tmp_path, language, named):
    """The tokenizer is among the settings where it is not 13a, which results of earlier versions do not name."""
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.en").write_text("one\n")
        (tmp_path / f"{split}.{language}").write_text("eins\n")
    settings = {"languages": ["en", language], "tokenizer": "none", "bpe": "none"}
    (tmp_path / "manifest.json").write_text(json.dumps({"settings": settings}))
    reference, system = ["我们今天在北京见面，好吗？ A.B."], ["我们今天在北京见面，好的？ A.B."]
    for kind in ("parallel", "prepared"):
        one = task(kind, data=str(tmp_path), **({"target": language} if kind == "parallel" else {}))
        assert {key: value for key, value in one.options().items() if key == "tokenize"} == named
        found = METRICS["BLEU"].value(one.statistics(system, reference)["BLEU"].sum(0))
        expected = BLEU(trg_lang=language).corpus_score(system, [reference]).score
        assert found == pytest.approx(expected, abs=1e-9)
    chosen = task("parallel", data=str(tmp_path), source="en", target=language, tokenize="char")
    assert chosen.options()["tokenize"] == "char"
    with pytest.raises(ValueError, match="tokenize is one of .*, got words"):
        task("parallel", data=str(tmp_path), tokenize="words")


def test_a_tokenizer_that_is_not_installed_is_said_before_data_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    for split in ("train", "valid", "test"):
        for language in ("en", "ja"):
            (tmp_path / f"{split}.{language}").write_text("one\n")
    with pytest.raises(ValueError, match=r'pip install "sacrebleu\[ja\]", or give the task\'s tokenize: char'):
        task("parallel", data=str(tmp_path)).prepare(tmp_path / "work")


def test_the_built_in_corpus_is_words():
    """Its options are those of earlier versions' results."""
    assert "tokenize" not in task("built_in").options()
    assert task("built_in").statistics(["a. b"], ["a . b"])["BLEU"][0, :2].tolist() == [2, 3]


def test_accuracy_is_the_share_of_right_labels(tmp_path, monkeypatch):
    asked = task("even_pairs")
    name = asked.sets()[0]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / f"{name}.input0").write_text("a b\nb a\na a\n")
    outputs = np.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]]), np.array([0, 1, 1]), np.array([4, 4, 4])
    monkeypatch.setattr(classification, "logits_of", lambda *_: outputs)
    scored = asked.score(name, SimpleNamespace(data=tmp_path))
    assert METRICS["accuracy"].value(scored.statistics["accuracy"].sum(0)) == pytest.approx(200 / 3)


MADE = {"settings": {"languages": ["en", "de"], "tokenizer": "none", "bpe": "none"}, "command": "relpos"}
ONE_LINE = {"train.en": "one", "valid.en": "one", "test.en": "one"} | {"train.de": "a", "valid.de": "a", "test.de": "a"}
READ_AND_NOT = [  # files of a folder, one that the runs read, and one beside it
    ("mlm", {"data-bin/valid.idx": "a", "data-bin/dict.txt": "a", "work/counts.json": "a", "manifest.json": "a"}),
    (
        "prepared",
        {"data-bin/dict.txt": "a", "reference/test.de": "a", "manifest.json": json.dumps(MADE), ".stages/x": "a"},
    ),
    ("glue", {"RTE/input0/dict.txt": "a", "RTE/task.json": "{}", "RTE/README": "a"}),
    ("parallel", {**ONE_LINE, "README": "a"}),
]


@pytest.mark.parametrize(("kind", "files"), READ_AND_NOT, ids=[kind for kind, _ in READ_AND_NOT])
def test_data_are_named_by_what_is_read_of_a_folder(kind, files, tmp_path):
    """Not by its place, the command that made it and what is left of making it."""

    def keys(folder: str, changed: dict[str, str]) -> list[str]:
        for name, content in {**files, **changed}.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        one = task(kind, data=tmp_path / folder, **({"name": "RTE"} if kind == "glue" else {}))
        return [one.data_key, one.hash_inputs()]

    read, *_, beside = files
    first = keys("first", {})
    again = json.dumps({"settings": {**MADE["settings"], "learn_lines": 5}, "command": "relpos again"})
    assert keys("again", {beside: "b", "manifest.json": again}) == first
    assert not {*keys("other", {read: "b"})} & {*first}


def test_what_a_manifest_says_of_the_text_names_the_data(tmp_path):
    for folder in ("data-bin", "reference"):
        (tmp_path / folder).mkdir()
    names = set()
    for units in ("none", "sentencepiece"):
        settings = {**MADE["settings"], "bpe": units}
        (tmp_path / "manifest.json").write_text(json.dumps({"settings": settings}))
        names.add(task("prepared", data=tmp_path).data_key)
    assert len(names) == 2


def test_a_linked_part_of_a_folder_counts_by_its_content(tmp_path):
    names = set()
    for content in "ab":
        folder = tmp_path / content / "RTE"
        folder.mkdir(parents=True)
        (folder / "task.json").write_text("{}")
        (tmp_path / f"parts-{content}").mkdir()
        (tmp_path / f"parts-{content}" / "train.bin").write_text(content)
        (folder / "input0").symlink_to(tmp_path / f"parts-{content}")
        names.add(task("glue", name="RTE", data=folder.parent).data_key)
    assert len(names) == 2


SPLITS = {f"{split}.{ending}": "x" for split in ("train", "valid", "test") for ending in ("bin", "idx")}


def filled(folder: Path, **documents: str) -> Path:
    """A folder of the kind `memory`."""
    folder.mkdir()
    for name, content in {**SPLITS, "dict.txt": "x", **documents}.items():
        (folder / name).write_text(content)
    return folder


def test_documents_count_by_their_split(tmp_path):
    names = {
        task("memory", data=filled(tmp_path / split, **{f"{split}.documents.npy": "1"})).data_key
        for split in ("train", "valid")
    }
    assert len(names) == 2


def test_linked_data_are_those_of_the_specification(tmp_path):
    """Not those of another place, which were equal once and have changed since."""
    first, second = (task("memory", data=filled(tmp_path / name), timed=0) for name in ("first", "second"))
    assert first.data_key == second.data_key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "read_indexed", lambda _: SimpleNamespace(sizes=np.array([100])))
        first.prepare(tmp_path / "work")
        (tmp_path / "first" / "train.bin").write_text("other")
        folder = second.prepare(tmp_path / "work")
        made = (folder / "data.json").stat().st_ino
        assert second.prepare(tmp_path / "work") == folder and (folder / "data.json").stat().st_ino == made
    assert (folder / "bin" / "train.bin").read_text() == "x"


def test_files_that_flags_of_a_fine_tuning_name_count_by_their_content(tmp_path):
    for name, content in {"data/valid.idx": "", "squad/train.json": "", "squad/valid.json": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    names = []
    for folder in "abc":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dict.txt").write_text("other" if folder == "c" else "same")
        train = {"tokenizer-folder": str(tmp_path / folder)}
        then = {"kind": "questions", "data": str(tmp_path / "squad"), "train": train}
        names.append(task("mlm", data=tmp_path / "data", finetune={"SQuAD": then}).data_key)
    assert names[0] == names[1] != names[2]
