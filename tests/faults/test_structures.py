"""Files whose structure is broken: a field that is lost, of another type or there twice, a folder in a file's place.

A format is a row of `FORMATS`: its name, what writes a valid file, what reads it, how it is taken apart, and which of
its places decide results. Whatever is done to it, the reader succeeds or says one line that names the file; a loss or
another type at such a place may not succeed. RELPOS_FAULTS makes more of each, as in test_faults.py.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import relpos_fairseq  # noqa: F401
from helpers.commands import relpos
from helpers.glue_data import write_glue, write_tokenizer
from helpers.questions import make_file
from helpers.tokenizers import bpe_folder, sentencepiece_folder, wordpiece_folder
from relpos_fairseq.io.command import run_command

from .test_faults import MALFORMED

pytestmark = pytest.mark.slow
NUMBER = MALFORMED if MALFORMED > 12 else 10  # of each format
DEEP = "[" * 10_000 + "]" * 10_000
TWICE, DEEPLY, DIGITS = "@twice", "@deeply", "@digits"  # what stands for what no library writes
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    10**20,
    DIGITS,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    {},
    [None],
    "\ud800",
]
Place = tuple[Any, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """The places of a value's parts, at most eight of each list or object."""
    parts = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for name, part in parts[:4] + parts[-4:] if len(parts) > 8 else parts:
        yield (*place, name)
        yield from places(part, (*place, name))


def at(value: Any, place: Place) -> Any:
    for part in place:
        value = value[part]
    return value


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=False).encode()


@dataclass(frozen=True)
class Format:
    """A format, and how it is taken apart.

    Attributes:
        write: writes a valid file, and all that belongs to it, below a folder; returns the file.
        read: reads it, by a command or as one does; returns an exit status or anything.
        kind: "json", "yaml", "lines", or "" for what is not taken apart.
        needed: a pattern of places, such as "data/0", that may not be lost or retyped.
    """

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    kind: str = "json"
    needed: str = "$^"


def structured(content: bytes, kind: str, pick: random.Random) -> tuple[str, bytes, str]:
    """What was done, what came of it, and the place if it was lost or has another type."""
    load, dump = (json.loads, as_json) if kind == "json" else (yaml.safe_load, as_yaml)
    whole = load(content)
    place = pick.choice(sorted(set(places(whole)), key=str))
    holder, name = at(whole, place[:-1]), place[-1]
    old = copy.deepcopy(holder[name])
    where = "/".join(map(str, place))
    how = pick.choice(("remove", "retype", "retype", "twice", "deep"))
    if how == "remove":
        del holder[name]
        return f"remove {where}", dump(whole), where if isinstance(holder, dict) else ""
    if how == "twice" and isinstance(holder, dict):
        holder[TWICE] = old
        return f"twice {where}", dump(whole).replace(TWICE.encode(), str(name).encode()), where
    if how == "deep":
        holder[name] = DEEPLY
        return f"deep {where}", re.sub(rf"""["']{DEEPLY}["']""".encode(), DEEP.encode(), dump(whole)), where
    new = pick.choice([value for value in VALUES if kind == "json" or value != "\ud800"])
    holder[name] = new
    written = dump(whole).replace(f'"{DIGITS}"'.encode(), b"9" * 5000)
    numbers = isinstance(old, (int, float)) and isinstance(new, (int, float))
    other = type(old) is not type(new) and not numbers
    return f"retype {where} {str(new)[:20]!r}", written, where if other else ""


def in_lines(content: bytes, pick: random.Random) -> tuple[str, bytes, str]:
    lines = content.split(b"\n")
    number = pick.randrange(len(lines))
    line = lines[number]
    new = {
        "lose": [],
        "twice": [line, line],
        "empty": [b""],
        "short": [line.split()[0] if line.split() else b""],
        "long": [line + b" x y"],
        "cut": [line[: len(line) // 2]],
        "null": [line + b"\0"],
        "separator": ["\u2028".encode() + line],
    }
    how = pick.choice(sorted(new))
    return f"{how} line {number + 1}", b"\n".join([*lines[:number], *new[how], *lines[number + 1 :]]), ""


def raw(content: bytes, pick: random.Random) -> tuple[str, bytes, str]:
    """A change of the bytes."""
    end = pick.randrange(len(content))
    changes = {
        f"cut at {end}": content[:end],
        "empty": b"",
        "no UTF-8": content[:end] + b"\xff\xfe" + content[end:],
        "mark": b"\xef\xbb\xbf" + content,
        "CRLF": content.replace(b"\n", b"\r\n"),
        "UTF-16": content.decode("latin-1").encode("utf-16"),
        "null bytes": b"\0" * 100,
        "brackets": b"[" * 100_000,
        "another": pick.choice(
            [b"a: 1\n", b"{}", b"[]", b"3", b"null", b'"x"', b"PK\3\4", b"\x80\2}q\0.", b"\x1f\x8b\b"]
        ),
    }
    how = pick.choice(sorted(changes))
    return how, changes[how], ""


def mutate(path: Path, kind: str, pick: random.Random) -> tuple[str, str]:
    """Change a file; returns what was done, and the place that was lost or has another type."""
    if pick.random() < 0.03:
        path.unlink()
        path.mkdir()
        return "a folder", ""
    content = path.read_bytes()
    zipped = content.startswith(b"\x1f\x8b") and pick.random() < 0.8
    content = gzip.decompress(content) if zipped else content
    kind = "" if content.startswith(b"\x1f\x8b") else kind
    if kind and pick.random() < 0.75:
        done, new, place = in_lines(content, pick) if kind == "lines" else structured(content, kind, pick)
    else:
        done, new, place = raw(content, pick)
    path.write_bytes(gzip.compress(new) if zipped else new)
    return done, place


def outcome(form: Format, path: Path, place: str) -> tuple[str, str]:
    """How a reader met a file, and what it said."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = run_command(lambda argv: form.read(path))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "traceback", f"{type(error).__name__}: {str(error)[:200]}"
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    if status == 0:
        return ("silent" if place and re.search(form.needed, place) else "accepted"), ""
    if len(lines) != 1 or "Traceback" in said.getvalue():
        return "traceback", said.getvalue()[-300:]
    named = path.name in lines[0] or str(path.parent) in lines[0]
    return ("refused" if named else "unnamed"), lines[0][:300]


# Formats


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else as_json(content))
    return path


def _questions(folder: Path) -> Path:
    path = make_file(folder / "q.json", 3, 1, unanswerable=True)
    ids = [one["id"] for a in json.loads(path.read_text())["data"] for p in a["paragraphs"] for one in p["qas"]]
    written(folder, "a.json", dict.fromkeys(ids, "red"))
    written(folder, "o.json", dict.fromkeys(ids, 0.5))
    return path


def _evaluate(path: Path) -> int:
    files = {name: path.parent / name for name in ("q.json", "a.json", "o.json")}
    return relpos("evaluate", "qa", files["q.json"], "--predictions", files["a.json"], "--null-odds", files["o.json"])


def _beside(write: Callable[[Path], object], name: str) -> Callable[[Path], Path]:
    def both(folder: Path) -> Path:
        write(folder)
        return folder / name

    return both


def _with(write: Callable[[Path], object], name: str, content: Any) -> Callable[[Path], Path]:
    def both(folder: Path) -> Path:
        write(folder)
        return written(folder, name, content)

    return both


def _tokenizer(path: Path) -> None:
    from relpos_fairseq.text.folders import load_tokenizer

    load_tokenizer(path.parent).encode("A man, a plan.")


def _merges(path: Path) -> None:
    from relpos_fairseq.text.subwords import load_subwords

    load_subwords("subword-nmt", path)("a man a plan")


def _bpe(path: Path) -> None:
    from argparse import Namespace

    from fairseq.data import encoders

    encoders.build_bpe(Namespace(bpe="subword_nmt", bpe_codes=str(path), bpe_separator="@@")).encode("a man")


def _sentencepiece(path: Path) -> None:
    from relpos_fairseq.text.subwords import load_subwords

    load_subwords("sentencepiece", path)("a man a plan")


def _spec(path: Path) -> None:
    from relpos_fairseq.lab.comparison.spec import read_spec

    read_spec(path)


def _archive(path: Path) -> None:
    from relpos_fairseq.lab.comparison.results import read_archive

    read_archive(path)


def _text(path: Path) -> None:
    from relpos_fairseq.inference.model_card import write_card
    from relpos_fairseq.text.assets import read_text

    read_text(path.parent).encode("a man")
    write_card(path.parent, {}, "fairseq-train", path)


def _scores(path: Path) -> None:
    from relpos_fairseq.plots.results import read_scores

    read_scores(path)


def _curves(path: Path) -> None:
    from relpos_fairseq.plots.results import read_curves

    read_curves(path, "loss")


def _documents(path: Path) -> None:
    from relpos_fairseq.preparation.documents import read_stream
    from relpos_fairseq.preparation.settings import Reading

    list(read_stream(path, Reading(documents="json")))


def _config(path: Path) -> None:
    from relpos_fairseq.formats.transformers_folder import read_config

    read_config(path.parent)


def _index(path: Path) -> None:
    from relpos_fairseq.formats.transformers_folder import weight_files

    weight_files(path.parent)


def _table(path: Path) -> None:
    from relpos_fairseq.preparation.glue_tasks import GLUE, TableFile, read_examples

    list(read_examples(TableFile(path, GLUE["RTE"].columns), GLUE["RTE"]))


def _csv(path: Path) -> None:
    from relpos_fairseq.lab.benchmarks.measurement import read_csv

    read_csv(path)


def _resumed(path: Path) -> None:
    from relpos_fairseq.io.stages import ResumeLog

    ResumeLog(path, {"a": 1})


def _record(folder: Path) -> Path:
    from relpos_fairseq.io.stages import ResumeLog

    with ResumeLog(folder / "r.jsonl", {"a": 1}).opened() as keep:
        for number in range(3):
            keep([number, 0.5])
    return folder / "r.jsonl"


SPEC = {
    "title": "a",
    "seeds": 2,
    "schemes": {"near": {"position-scheme": "shaw", "position-clip-distance": 4}, "none": None},
    "train": {"max-update": 12},
    "tasks": {"copying": {"kind": "copy", "longest": 4, "beyond": 6, "examples": 200, "each": 2}},
    "slurm": {"timeout_min": 60},
}
PACKED = {"type": "|u1", "shape": [1, 2], "zlib": "eNpjZAAAAAQAAg=="}
SCORED = {"values": {"BLEU": 1.5}, "lengths": PACKED, "statistics": {"BLEU": PACKED}, "seconds": 1.5}
RESULT = {"run": "a/b-seed1-0", "task": "a", "scheme": "b", "seed": 1, "sets": {"t": SCORED}}
RESULT |= {"settings": {"task": {"kind": "copy"}, "train": {"lr": 1}}, "versions": {"numpy": "2"}, "unit": "words"}
RESULT |= {"code": "c", "data": "d", "validations": [{"updates": 1, "valid_loss": 2.5}], "parameters": 1}
RESULT |= dict.fromkeys(("tokens_per_second", "seconds", "processor_seconds", "megabytes"), 1.5)
FILE = {"bytes": 1, "sha256": "0"}
MANIFEST = {
    "command": "relpos prepare",
    "level": "word",
    "settings": {"languages": ["en", "de"]},
    "inputs": {"a": FILE},
    "outputs": {"b": FILE},
}
CONFIG = {"model_type": "bert", "vocab_size": 40, "hidden_size": 16, "layer_norm_eps": 1e-5, "pad_token_id": 0}
TOLD = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "cls_token": {"content": "[CLS]", "lstrip": False}}
LOG = "".join(f'2024 | INFO | train_inner | {{"num_updates": "{n}", "loss": "{9 - n}.5"}}\n' for n in range(1, 5))
LOG = LOG.replace("INFO | train", "x | train").encode()
MERGES = b"#version: 0.2\na n\nm an</w>\np l\npl an</w>\n"
FORMATS = [
    Format("questions", _questions, _evaluate, needed=r"^data$|paragraphs$|context$|qas$|/id$|question$|answer_start$"),
    Format("predictions", _beside(_questions, "a.json"), _evaluate, needed="twice"),
    Format("odds", _beside(_questions, "o.json"), _evaluate),
    Format("tokenizer.json", _beside(write_tokenizer, "tokenizer.json"), _tokenizer, needed="^model$|^model/vocab$"),
    Format("vocab.json", _beside(bpe_folder, "vocab.json"), _tokenizer),
    Format("merges.txt", _beside(bpe_folder, "merges.txt"), _tokenizer, "lines"),
    Format("vocab.txt", _beside(wordpiece_folder, "vocab.txt"), _tokenizer, "lines"),
    Format("tokenizer_config.json", _with(wordpiece_folder, "tokenizer_config.json", TOLD), _tokenizer),
    Format("added_tokens.json", _with(wordpiece_folder, "added_tokens.json", {"covid19": 90, "x1": 91}), _tokenizer),
    Format(
        "special_tokens_map.json", _with(wordpiece_folder, "special_tokens_map.json", {"cls_token": "@c"}), _tokenizer
    ),
    Format(
        "sentencepiece of a folder",
        _beside(lambda f: sentencepiece_folder(f, "spm.model"), "spm.model"),
        _tokenizer,
        "",
    ),
    Format("sentencepiece", _beside(lambda f: sentencepiece_folder(f, "m.model"), "m.model"), _sentencepiece, ""),
    Format("merges", lambda f: written(f, "codes", MERGES), _merges, "lines"),
    Format("merges of --bpe", lambda f: written(f, "codes", MERGES), _bpe, "lines"),
    Format("specification", lambda f: written(f, "s.yaml", as_yaml(SPEC)), _spec, "yaml", "^schemes$|^tasks$|kind$"),
    Format("results", lambda f: written(f, "r.gz", gzip.compress(as_json(RESULT))), _archive, needed="^[a-z_]+$"),
    Format("manifest", lambda f: written(f, "manifest.json", MANIFEST), _text),
    Format(
        "scores",
        lambda f: written(f, "s.json", {"m/MNLI": {"values": {"accuracy": 1.5}}, "q": {"XQuAD": [6.5, 2]}}),
        _scores,
    ),
    Format("log", lambda f: written(f, "train.log", LOG), _curves, "lines"),
    Format("documents", lambda f: written(f, "d.json", {"text": "a\nb", "id": 1}), _documents, needed="text"),
    Format("config.json", lambda f: written(f, "config.json", CONFIG), _config),
    Format(
        "index of weights",
        _with(
            lambda f: None, "model.safetensors.index.json", {"weight_map": {"a": "b.safetensors", "c": "d.safetensors"}}
        ),
        _index,
        needed="^weight_map$",
    ),
    Format(
        "table",
        _beside(lambda f: shutil.copytree(write_glue(f / "glue") / "RTE", f / "RTE"), "RTE/train.tsv"),
        _table,
        "lines",
    ),
    Format("CSV", lambda f: written(f, "t.csv", b"a,b\n1,x\n2,y\n"), _csv, "lines"),
    Format("record", _record, _resumed, "lines"),
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_broken_structure_is_one_line(tmp_path: Path, form: Format) -> None:
    valid = tmp_path / "valid"
    valid.mkdir()
    name = form.write(valid).relative_to(valid)
    assert outcome(form, valid / name, "")[0] == "accepted"
    counts: Counter = Counter()
    wrong = []
    for number in range(NUMBER):
        pick = random.Random(f"{form.name} {number}")
        folder = tmp_path / str(number)
        shutil.copytree(valid, folder)
        done, place = mutate(folder / name, form.kind, pick)
        how, said = outcome(form, folder / name, place)
        counts[how] += 1
        if how not in ("accepted", "refused"):
            wrong.append(f"{how}: {done}: {said}")
        shutil.rmtree(folder)
    print(f"{form.name}: {dict(counts)}")
    assert not wrong, "\n".join(dict.fromkeys(wrong[:40]))
