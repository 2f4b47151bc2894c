"""What each command refuses, and what it says: a wrong line is one row of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers import commands as cli
from helpers import roberta, segment_corpus
from helpers.folders import contents
from helpers.questions import TASK, TRAIN, make_file, training
from helpers.scored import REFERENCE, TOKENS, generated, write_prepared
from helpers.shell import Shell, told

# `relpos`.  A line runs in a folder that a function has filled; `...` stands for what is left out of an error.


def nothing(folder: Path) -> None:
    """The line itself is wrong."""


def inputs(folder: Path) -> None:
    """Files that a command would write over."""
    (folder / "text").mkdir()
    (folder / "in.txt").write_text("mine\n")
    (folder / "text" / "train.txt").write_text("mine\n" * 40)
    (folder / "page.md").write_text("nothing\n")


def files(folder: Path) -> None:
    """Files of which none is what a command reads."""
    (folder / "MODEL").write_bytes(b"")
    (folder / "bad.txt").write_bytes(b"good\n\xff\n")
    (folder / "dict.txt").write_text("a 1\n")
    (folder / "folder").mkdir()


def epochs(folder: Path) -> None:
    """Folders of checkpoints, which are empty, by the ends of their names."""
    named = {"epochs": "1 2 3", "last": "1 2 _last", "updates": "_1_9", "suffix": "1-a 2-a", "none": ""}
    for name, ends in (named | {"seven": "1-a 2-a 3-a 4-a 5-a 6-a 7-a"}).items():
        (folder / name).mkdir()
        for end in ends.split():
            (folder / name / f"checkpoint{end}.pt").touch()
    torch.save({"model": {}}, folder / "broken.pt")
    (folder / "broken.pt").write_bytes((folder / "broken.pt").read_bytes()[:200])


def translations(folder: Path) -> None:
    """A reference, and translations that are not as many, or not of it."""
    write_prepared(folder / "prepared")
    (folder / "system.de").write_text("zu wenig\n")
    (folder / "lm").mkdir()
    (folder / "lm" / "manifest.json").write_text('{"settings": {"level": "word"}}')
    (folder / "a").write_text("\n".join(REFERENCE) + "\n")
    numbers = {"missing": [n for n in range(20) if n not in (3, 17)], "repeated": [*range(20), 5], "unknown": range(21)}
    for name, those in numbers.items():
        (folder / f"{name}.txt").write_text(generated([*TOKENS, "mehr"], numbers=those))


def questions(folder: Path) -> None:
    """Questions and predictions."""
    make_file(folder / "q.json", 1, 1, unanswerable=True)
    (folder / "p").touch()
    for name, content in {"n": {"0-0": [{"text": "x"}]}, "a": {"0-0": "x", "0-1": ""}, "o": {"0-0": 0.5}}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def articles(folder: Path) -> None:
    """Questions to be prepared."""
    make_file(folder / "t.json", 6, 1)
    make_file(folder / "short.json", 3, 1)
    (folder / "broken.json").write_text('{"data": 1}')
    (folder / "pieces").mkdir()
    (folder / "pieces" / "sentencepiece.model").write_bytes(b"")


@pytest.fixture(scope="session")
def others(translator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator without its text, half of it, and a checkpoint and data of others."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "alone.pt").symlink_to(translator)
    (folder / "cut.pt").write_bytes(translator.read_bytes()[:5000])
    torch.save({"weight": torch.zeros(2)}, folder / "foreign.pt")
    (folder / "data").mkdir()
    for side in ("src", "tgt"):
        (folder / "data" / f"dict.{side}.txt").write_text("only 1\n")
    (folder / "data" / "test.src-tgt.src.idx").write_bytes(b"torn")
    return folder


@pytest.fixture(scope="session")
def fairseqs(briefly: Callable[..., Path]) -> Path:
    """A checkpoint of fairseq's own transformer."""
    return briefly("--arch", "transformer_tiny", "--no-token-positional-embeddings")


RELPOS: dict[Callable[..., None], dict[str, str]] = {
    nothing: {
        "avrage x": "did you mean relpos average?",
        "prepare wtm en-de": "did you mean relpos prepare wmt?",
        "evalute": "did you mean relpos evaluate?",
        "score x --refrence y": "did you mean --reference?",
        "xyz": "there is no command xyz (see",
        "prepar wmt": "there is no command prepar wmt",
        "completion tcsh": "argument shell: invalid choice: 'tcsh'",
        "schemes m44": "error: unknown position scheme 'm44': choose one of ",
        "average --out x.pt": "relpos average: error: ",
        "average nowhere --out o": "checkpoints nowhere does not exist",
        "average nowhere --last 2 --out o": "checkpoints nowhere does not exist",
        "average nowhere --last-updates 2 --out o": "checkpoints nowhere does not exist",
    },
    inputs: {
        "translate m.pt in.txt --out in.txt": "is also an input",
        "fill m.pt in.txt --out in.txt": "is also an input",
        "average in.txt --out in.txt": "is also an input",
        "score in.txt --reference in.txt --target-lang de --out in.txt": "is also an input",
        "prepare lm --train in.txt --valid in.txt --level word --out in.txt": "is also an input",
        "prepare lm --text text/train.txt --shares 0.5,0.5 --out .": "train.txt is also an input",
        "schemes --write page.md": "add both markers",
    },
    files: {
        "translate folder": "is a folder: name the checkpoint in it",
        "translate no.pt": "no.pt does not exist",
        "translate <translator> bad.txt": "bad.txt, line 2: invalid UTF-8",
        "translate <translator> --nbest 6": "--nbest 6 needs --beam 6, got 5",
        "sample <translator>": "is of task translation, which relpos sample does not run: use ",
        "sample <recurrent> --context 9": "--context is for models without memory: give --mem-len",
        "classify no.pt bad.txt --cpu": "no.pt does not exist: give a file",
        "evaluate lm <absolute> --data <stream> --mem-len 4": "has no memory; leave it out",
        "evaluate lm <absolute> --data <stream> --context 9": "has 8 positions",
        "evaluate lm <recurrent> --data <stream> --stride 0": "--stride must be >= 1, got 0",
        "evaluate lm <recurrent> --data <stream> --tokens 9999": "asked for the last 9999",
        "evaluate lm <recurrent> --data <stream> --decay 0.1": "--decay needs --dynamic RATE",
        "evaluate lm <recurrent> --data <stream> --rms 9": "--rms needs --dynamic RATE",
        "evaluate lm <recurrent> --data <stream> --dynamic 1 --epsilon 1": "--epsilon needs --rms N",
        "evaluate lm <recurrent> --data <stream> --dynamic 1 --rms 0": "--rms must be >= 1, got 0",
        "evaluate lm <recurrent> --data <stream> --dynamic -1": "--dynamic must be above 0, got -1.0",
        "evaluate lm <recurrent> --data <stream> --context 4 --dynamic 1": "is not read with memory; leave it out",
        "evaluate length <absolute> --data <stream> --out out --mem-len 4": "has no memory",
        "evaluate length <recurrent> --data <stream> --out out --lengths 0": "--lengths must be >= 1, got 0",
        "evaluate length <recurrent> --data <stream> --out out --mem-len -3": "--mem-len must be >= 0, got -3",
        "evaluate length <recurrent> --data <stream> --out out --tokens 0": "--tokens must be >= 1, got 0",
        "evaluate length <recurrent> --data <stream> --out out --split absent": "absent",
        "evaluate length nothing.pt --data <stream> --out out": "nothing.pt does not exist",
        "evaluate length <recurrent> --data . --out out": "binarise the text with the dictionary of its training",
        "benchmark lm <absolute> --data <stream>": "has no memory: give it as --baseline",
        "benchmark lm <recurrent> --data <stream> --context 3": "--context must be >= the trained segment",
        "evaluate xtreme --out out": "nothing to evaluate",
        "evaluate xtreme --out out --xnli-model MODEL": "belong together: give both",
        "evaluate xtreme --out out --xnli-model MODEL --xnli .": "has no test_LANGUAGE",
        "evaluate xtreme --out out --qa-model MODEL": "one of --xquad, --mlqa, --tydiqa",
        "evaluate xtreme --out out --qa-model MODEL --xquad no": "--xquad no does not exist: give a folder",
        "evaluate xtreme --out out --qa-model no.pt --xquad .": "--qa-model no.pt does not exist: give a file",
        "evaluate xtreme --out out --qa-model MODEL --xquad .": "has no file of XQuAD's, such as xquad.de.json",
        "translate <others>/alone.pt": "no text/ beside",
        "plot --out out": "give a checkpoint",
        "plot no.pt --out out": "no.pt does not exist...give a file",
        "plot <others>/cut.pt --out out": "cut.pt...truncated...copy it again",
        "plot <others>/foreign.pt --out out": "foreign.pt...it holds no model",
        "plot <fairseqs> --out out": "has no position scheme...relpos model",
        "plot <translator> --out out --data no": "--data...does not exist",
        "plot <translator> --out out --data <others>/data": "--data...may be another model's",
        "plot <others>/alone.pt --out out --sentence the": "no text/ beside...--data",
        "plot <translator> --out out --length 1": "--length...>= 2, got 1",
        "plot <translator> --out out --segments x": "--segments...got x",
        "plot <translator> --out MODEL": "is a file...give a folder",
        "plot <translator>": "--out",
    },
    epochs: {
        "average broken.pt --out out.pt": "is truncated",
        "average none.pt --out out.pt": "does not exist",
        "average epochs --out out.pt": "add --last N",
        "average epochs --last 9 --out out.pt": "has 3 checkpoints",
        "average epochs --last-updates 1 --out out.pt": "has 0 checkpoints",
        "average last --last-updates 3 --out out.pt": "0 checkpoints like checkpoint_2_5000.pt, 3 asked for; its files "
        "are checkpoint1.pt, checkpoint2.pt, checkpoint_last.pt: give --last 2, name the checkpoints one by one, or "
        "train with --save-interval-updates and --keep-interval-updates",
        "average updates --last 2 --out out.pt": "checkpoint7.pt, 2 asked for; its files are checkpoint_1_9.pt: "
        "give --last-updates 1, ",
        "average suffix --last 2 --out out.pt": "its files are checkpoint1-a.pt, checkpoint2-a.pt: name the "
        "checkpoints one by one",
        "average seven --last 2 --out out.pt": "checkpoint6-a.pt and 1 more: name",
        "average none --last 2 --out out.pt": "its files are none: name",
    },
    translations: {
        "score missing.txt --prepared prepared": "2 are missing (3, 17)",
        "score repeated.txt --prepared prepared": "1 are repeated (5)",
        "score unknown.txt --prepared prepared": "1 are unknown (20)",
        "score system.de --prepared prepared": "has 1 lines, the reference has 20",
        "score system.de": "error: give either --prepared DIR or --reference FILE",
        "score system.de --prepared .": ". has no manifest.json: run prepare_wmt.py to its end",
        "score system.de --prepared prepared --split test9": "prepared has no set test9: choose one of test (t)",
        "score system.de --reference system.de": "--reference needs --target-lang, say de",
        "score system.de --prepared lm": "is not of a whole run of relpos prepare wmt",
        "score system.de --prepared prepared --resamples 0": "--resamples must be >= 1, got 0",
        "score a --reference a system.de --target-lang de": "system.de has 1 lines and a 20: every "
        "reference has a line for each sentence",
        "score a --reference a --target-lang de --tokenize words": "--tokenize must be one of none, zh, ...got words",
    },
    questions: {
        "evaluate qa q.json": "give either --checkpoint FILE or --predictions",
        "evaluate qa q.json --checkpoint p": "give --out",
        "evaluate qa q.json --checkpoint no.pt --out o": "--checkpoint no.pt does not exist: give a file that does",
        "evaluate qa q.json q.json --predictions p": "belongs to one file",
        "evaluate qa q.json --predictions p --n-best 2": "--n-best needs --checkpoint",
        "evaluate qa q.json --predictions p --na-prob-thresh 0": "needs --null-odds",
        "evaluate qa q.json --checkpoint p --null-odds p": "--null-odds needs --predictions",
        "evaluate qa q.json --checkpoint p --max-tokens 0": "--max-tokens must be >= 1, got 0",
        "evaluate qa x.json --predictions p": "files x.json does not exist: give a file that does",
        "evaluate qa q.json --predictions n.json": "n.json is not the JSON that is expected (0-0 is [{",
        "evaluate qa q.json --predictions a.json --null-odds o.json": "o.json lacks 1 of the ids of a.json: 0-1",
    },
    articles: {
        "prepare qa --train t.json --out o --train-articles 2": "--tokenizer-folder FOLDER or --train-tokenizer",
        "prepare qa --train t.json --out o --train-tokenizer bpe": "--valid FILES or --train-articles",
        "prepare qa --train t.json --out o --train-tokenizer bpe --train-articles 6": "leaves none of the 6 articles",
        "prepare qa --train t.json --out o --train-tokenizer bpe --train-articles 0": "--train-articles must be >= 1",
        "prepare qa --train t.json --out o --tokenizer-folder pieces --train-articles 2": "no pieces/dict.txt",
        "prepare qa --train t.json --out o --tokenizer-folder pieces --vocab-size 9": "--vocab-size needs "
        "--train-tokenizer",
        "prepare qa --train t.json --out o --train-tokenizer bpe --train-articles 2 --eval short.json": "short.json "
        "has 3 articles",
        "prepare qa --train t.json --out o --train-tokenizer bpe --valid broken.json": "broken.json is "
        "not SQuAD's format (data is 1,",
        "prepare qa --train t.json --train-tokenizer bpe --train-articles 2 --out pieces": "--out pieces holds "
        "another tokenizer's sentencepiece.model",
    },
}


def rows_of(table: dict[Callable, dict[str, str]]) -> list:
    """The rows of a table, which a test is called by."""
    return [pytest.param(how, *row, id=row[0]) for how, rows in table.items() for row in rows.items()]


@pytest.mark.parametrize(("fill", "line", "said"), rows_of(RELPOS))
def test_a_wrong_line_of_relpos(fill: Callable, line: str, said: str, shell: Shell, tmp_path: Path) -> None:
    """One line says so, and no file is written or changed."""
    fill(tmp_path)
    before, paths = contents(tmp_path), {*tmp_path.rglob("*")}
    error = shell.refused(line)
    assert re.search(told(said), error), error
    assert before.items() <= contents(tmp_path).items()
    if fill is not articles:  # whose first stages are done before the next is refused
        assert {*tmp_path.rglob("*")} == paths


# fairseq's commands: what is wrong stands behind a command line that is right.


def translation(fixture: Callable, folder: Path) -> list[object]:
    flags = ("--max-update", "2", "--disable-validation")
    return ["train", *cli.train_arguments(fixture("corpus"), folder, *flags)]


def without_optimizer(fixture: Callable, folder: Path) -> list[object]:
    given = translation(fixture, folder)
    flags = [place for place, word in enumerate(given) if word.startswith(("--optimizer", "--adam"))]
    return [word for place, word in enumerate(given) if not {place, place - 1} & {*flags}]


def search(fixture: Callable, folder: Path) -> list[object]:
    return ["generate", *cli.generate_arguments(fixture("corpus"), fixture("translator"))]


def memory(fixture: Callable, folder: Path) -> list[object]:
    return ["train", *segment_corpus.arguments(fixture("stream"), folder, "--max-update", "1")]


def masked(fixture: Callable, folder: Path) -> list[object]:
    blocks = ["--tokens-per-sample", "24", "--max-update", "3", "--save-dir", folder]
    return ["train", fixture("packed"), *roberta.ARCH, *roberta.OPTIMIZE, *roberta.MASKED_LM, *blocks]


def answers(fixture: Callable, folder: Path) -> list[object]:
    return ["train", *training(fixture("squad"), folder, "--max-update", "1")]


def answers_of_fairseqs(fixture: Callable, folder: Path) -> list[object]:
    model = "--arch roberta_base --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16"
    heads = ("--encoder-attention-heads", "2", "--save-dir", folder)
    return ["train", fixture("squad"), *TASK, *TRAIN, *model.split(), *heads]


FAIRSEQ: dict[Callable[..., list], dict[str, str]] = {
    translation: {
        "--position-scheme m5": "unknown position scheme 'm5': choose one of none, ",
        "--position-scheme learned+m5": "unknown position scheme 'm5'",
        "--position-scheme learned+": "unknown position scheme ''",
        "--position-scheme none+m4": "none adds nothing, leave it out",
        "--position-scheme m4+m4": "each member may stand in a hybrid once",
        "--position-scheme deberta+m4": "scales disagree (deberta 1/sqrt(3d), m4 1/sqrt(1d))",
        "--decoder-position-scheme m5": "unknown position scheme 'm5'",
        "--position-scheme m4 --position-rank 4": "--position-rank 4 does not apply to position scheme m4: "
        "leave it out or at auto",
        "--position-scheme m4 --position-clip-distance -1": "clip_distance must be >= 0, got -1",
        "--position-scheme m4 --position-clip-distance far": "clip_distance must be a whole number >= 0, got far",
        "--position-scheme abs_scalar --position-rank 0": "rank must be >= 1, got 0",
        "--position-scheme m4 --position-share head": "--position-share must be auto, none, heads, layers or both, "
        "got head",
        "--position-scheme m4 --encoder-attention-heads 3": "embed_dim must be divisible by the number of heads, "
        "got embed_dim 32 and 3 heads",
        "--position-scheme m4 --segment-encoding head": "--segment-encoding head: translation supplies no segments; "
        "leave it at none",
        "--position-scheme m4 --attention-backend fast": "--attention-backend must be one of auto, reference, ",
        "--position-scheme m4 --attention-backend sdpa": "--attention-backend sdpa cannot evaluate key_vectors and "
        "query_vectors of position scheme m4: leave it at auto",
        "--position-scheme abs_scalar --position-rank 130 --attention-backend triton": "--attention-backend triton "
        "cannot evaluate static_factors of rank 130 ",
        "--position-scheme m4 --position-scale 0": "scale must be ",
        "--fp16": "--fp16 needs a GPU: on a CPU leave it out",
        "--encoder-learned-pos": "give --position-scheme learned, or for one side --encoder-position-scheme learned",
        "--cross-self-attention": "--cross-self-attention would mix the positions",
        "--left-pad-source False": "--left-pad-source False: the flag takes no value; alone it means False, and "
        "without it True",
    },
    without_optimizer: {"": "a training needs --optimizer: --optimizer adam, or --optimizer relpos_adam"},
    search: {
        "--beam 0": "--beam must be >= 1, got 0",
        "--nbest 0": "--nbest must be >= 1, got 0",
        "--max-tokens 5": "sample #... tokens, and a batch --max-tokens 5: raise it",
        "--left-pad-source False": "--left-pad-source False: the flag takes no value; alone it means "
        "False, and without it True",
        "--path absent.pt": "Model file not found: absent.pt",
    },
    memory: {
        "--position-scheme learned": "cannot carry memory",
        "--mem-len -1": "mem_len must be >= 0, got -1",
        "--clamp-len 5 --position-scheme t5": "--clamp-len 5 does not apply",
    },
    masked: {"--max-positions 16": "--max-positions 16 is smaller than ... 24 tokens"},
    answers: {
        "--valid-subset absent": "no split 'absent': expected ...absent.json",
        "--n-best 0": "--n-best must be 1 or more",
        "--max-query-length 2": "questions longer than --max-query-length 2",
        "--tokenizer-folder /nowhere": "no tokenizer folder /nowhere",
        "--segment-encoding head --num-segments 1": "--num-segments 1: question and context are 2 segments: "
        "give --num-segments 2",
    },
    answers_of_fairseqs: {"": "needs an --arch relpos_roberta"},
}


@pytest.mark.parametrize(("command", "line", "said"), rows_of(FAIRSEQ))
def test_a_wrong_line_of_fairseq(
    command: Callable, line: str, said: str, shell: Shell, tmp_path: Path, request
) -> None:
    """What is raised is one line, which is all that the command prints, and no checkpoint is written."""
    words = command(request.getfixturevalue, tmp_path / "checkpoints")
    with pytest.raises((ValueError, OSError)) as caught:
        cli.call(*words, *shell.words(line))
    assert re.search(told(said), str(caught.value)) and "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("*.pt"))
