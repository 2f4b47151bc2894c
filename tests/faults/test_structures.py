"""Files that are broken, in their structure or in their bytes: a field that is lost, of another type or there twice.

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
import resource
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from fairseq.data import encoders

from helpers import ROOT
from helpers import transformer_xl_original as original
from helpers.commands import relpos
from helpers.conversion import fairseq_roberta
from helpers.glue_data import write_glue, write_tokenizer
from helpers.questions import make_file
from helpers.tokenizers import bpe_folder, sentencepiece_folder, wordpiece_folder
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.scheme import AttentionShape
from relpos_fairseq.formats.transformers_folder import read_config, weight_files
from relpos_fairseq.inference.model_card import write_card
from relpos_fairseq.io.command import run_command
from relpos_fairseq.io.stages import ResumeLog
from relpos_fairseq.lab.benchmarks.measurement import read_csv
from relpos_fairseq.lab.comparison.results import read_archive
from relpos_fairseq.lab.comparison.spec import read_spec
from relpos_fairseq.plots.results import read_curves, read_scores
from relpos_fairseq.preparation.documents import read_stream
from relpos_fairseq.preparation.glue_tasks import GLUE, TableFile, read_examples
from relpos_fairseq.preparation.settings import Reading
from relpos_fairseq.text.assets import Vocabulary, read_text
from relpos_fairseq.text.folders import load_tokenizer
from relpos_fairseq.text.subwords import load_subwords

from .test_faults import FULL, KILLS, SIZE

pytestmark = pytest.mark.slow
NUMBER = 1250 if FULL else 60 * KILLS if SIZE else 12  # of each format
DEEP = "[" * 10_000 + "]" * 10_000
TWICE, DEEPLY, DIGITS = "@twice", "@deeply", "@digits"  # what stands for what no library writes
VALUES: list[Any] = [None, True, 0, -1, 10**20, DIGITS, 1.5, float("nan"), float("inf"), "", "x", [], {}, [None]]
WORDS = 'null [] {} " \t \n \r -1 1e999 \0 true <unk> </s> , :'.split(" ")
BYTES = [*(word.encode() for word in WORDS), b"\xff\xfe", "\ufeff \u2028 é 日".encode()]
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
    new = pick.choice([*VALUES, "\ud800"] if kind == "json" else VALUES)
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


def damaged(content: bytes, pick: random.Random) -> tuple[str, bytes, str]:
    """Some of the bytes cut, left out, put in, replaced or repeated."""
    done = []
    for _ in range(pick.randint(1, 3)):
        at = pick.randint(0, max(len(content) - 1, 0))
        upto = at + pick.randint(1, 40)
        before, part, after = content[:at], content[at:upto], content[upto:]
        new = pick.choice([*BYTES, pick.randbytes(pick.randrange(13))])
        changes = {"cut": before, "leave out": before + after, "put in": before + new + part + after}
        changes |= {"replace": before + new + after, "repeat": before + part + part + after}
        how = pick.choice(sorted(changes))
        content = changes[how]
        done.append(f"{how} at {at}")
    return ", ".join(done), content, ""


def raw(content: bytes, pick: random.Random) -> tuple[str, bytes, str]:
    """A change of the whole."""
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
        "another": pick.choice(OTHERS),
    }
    how = pick.choice(sorted(changes))
    return how, changes[how], ""


OTHERS = [b"a: 1\n", b"{}", b"[]", b"3", b"null", b'"x"', b"PK\3\4", b"\x80\2}q\0.", b"\x1f\x8b\b"]


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
    if kind and pick.random() < 0.65:
        done, new, place = in_lines(content, pick) if kind == "lines" else structured(content, kind, pick)
    else:
        done, new, place = pick.choice((raw, damaged))(content, pick)
    path.write_bytes(gzip.compress(new) if zipped else new)
    return done, place


def outcome(job: Callable[[], Any], names: tuple[str, ...]) -> tuple[str, str]:
    """How a job met its input, and what it said; an error must have one of the names."""
    said = io.StringIO()

    def main(argv: object) -> int:
        made = job()
        return made if isinstance(made, int) else 0

    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = run_command(main)
    except (Exception, SystemExit) as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:200]}"
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    if status == 0:
        return "accepted", ""
    if len(lines) != 1 or "Traceback" in said.getvalue():
        return "traceback", said.getvalue()[-300:]
    return ("refused" if any(name in lines[0] for name in names) else "unnamed"), lines[0][:300]


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


def _with(write: Callable[[Path], object], name: str, content: Any = None) -> Callable[[Path], Path]:
    """What writes a folder's files, of which this one is broken; content: it is written too."""

    def both(folder: Path) -> Path:
        write(folder)
        return folder / name if content is None else written(folder, name, content)

    return both


def _tokenizer(path: Path) -> None:
    load_tokenizer(path.parent).encode("A man, a plan.")


def _vocabulary(path: Path) -> None:
    Vocabulary(path.parent)
    _tokenizer(path)


def _split(name: str) -> Callable[[Path], object]:
    """What splits a text by a file of units."""
    return lambda path: load_subwords(name, path)("a man a plan")


def _documents(path: Path) -> None:
    list(read_stream(path, Reading(documents="json")))


def _text(path: Path) -> None:
    read_text(path.parent).encode("a man")
    write_card(path.parent, {}, "fairseq-train", path)


def _bpe(path: Path) -> None:
    encoders.build_bpe(Namespace(bpe="subword_nmt", bpe_codes=str(path), bpe_separator="@@")).encode("a man")


def _table(task: str) -> Format:
    """GLUE's table of a task."""
    write = _with(lambda f: shutil.copytree(write_glue(f / "glue") / task, f / task), f"{task}/train.tsv")
    columns = GLUE[task].columns
    return Format(f"table of {task}", write, lambda p: list(read_examples(TableFile(p, columns), GLUE[task])), "lines")


def _released(name: str, zipped: bool) -> Callable[[Path], Path]:
    """Transformer-XL's model.pt, in one of torch's formats, and the vocabulary in its cache.pt."""

    def write(folder: Path) -> Path:
        symbols = ["<eos>", "<unk>", *map(str, range(8))]
        original.save(original.model(10), folder / "model.pt", _use_new_zipfile_serialization=zipped)
        original.save(original.corpus(symbols), folder / "cache.pt")
        return folder / name

    return write


def _plain(folder: Path) -> Path:
    return fairseq_roberta(folder, "legacy")[0].rename(folder / "model.pt")


def _convert(path: Path, to: str = "same") -> int:
    return relpos("convert", path.parent / "model.pt", "--to", to, "--out", path.parent / "out.pt")


def _record(folder: Path) -> Path:
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
MANIFEST = {"command": "relpos prepare", "level": "word", "settings": {"languages": ["en", "de"]}}
MANIFEST |= {"inputs": {"a": FILE}, "outputs": {"b": FILE}}
CONFIG = {"model_type": "bert", "vocab_size": 40, "hidden_size": 16, "layer_norm_eps": 1e-5, "pad_token_id": 0}
TOLD = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "cls_token": {"content": "[CLS]", "lstrip": False}}
LOG = "".join(f'2024 | INFO | train_inner | {{"num_updates": "{n}", "loss": "{9 - n}.5"}}\n' for n in range(1, 5))
LOG = LOG.replace("INFO | train", "x | train").encode()
MERGES = b"#version: 0.2\na n\nm an</w>\np l\npl an</w>\n"
SHOWN = {"m/MNLI": {"values": {"accuracy": 1.5}}, "q": {"XQuAD": [6.5, 2]}}
WEIGHTS = {"weight_map": {"a": "b.safetensors", "c": "d.safetensors"}}
EXAMPLES = {name: (ROOT / "examples" / "comparison" / f"{name}.yaml").read_bytes() for name in ("scalars", "ablations")}
NEEDED = r"^data$|paragraphs$|context$|qas$|question$"  # an id may be a number; an unknown answer_start is said
KNOWN = "^(?!processor_seconds$|megabytes$)[a-z_]+$"  # of a run that was killed they are not
NOTHING: Callable[[Path], object] = lambda folder: None  # noqa: E731
FORMATS = [
    Format("questions", _questions, _evaluate, needed=NEEDED),
    Format("predictions", _with(_questions, "a.json"), _evaluate, needed="twice"),
    Format("odds", _with(_questions, "o.json"), _evaluate),
    Format("tokenizer.json", _with(write_tokenizer, "tokenizer.json"), _vocabulary, needed="^model$|^model/vocab$"),
    Format("dict.txt", _with(write_tokenizer, "dict.txt"), _vocabulary, "lines"),
    Format("vocab.json", _with(bpe_folder, "vocab.json"), _tokenizer),
    Format("merges.txt", _with(bpe_folder, "merges.txt"), _tokenizer, "lines"),
    Format("vocab.txt", _with(wordpiece_folder, "vocab.txt"), _tokenizer, "lines"),
    Format("tokenizer_config.json", _with(wordpiece_folder, "tokenizer_config.json", TOLD), _tokenizer),
    Format("added_tokens.json", _with(wordpiece_folder, "added_tokens.json", {"covid19": 90, "x1": 91}), _tokenizer),
    Format("special tokens", _with(wordpiece_folder, "special_tokens_map.json", {"cls_token": "@c"}), _tokenizer),
    Format("spm.model", _with(lambda f: sentencepiece_folder(f, "spm.model"), "spm.model"), _tokenizer, ""),
    Format(
        "sentencepiece", _with(lambda f: sentencepiece_folder(f, "m.model"), "m.model"), _split("sentencepiece"), ""
    ),
    Format("merges", lambda f: written(f, "codes", MERGES), _split("subword-nmt"), "lines"),
    Format("merges of --bpe", lambda f: written(f, "codes", MERGES), _bpe, "lines"),
    Format(
        "specification", lambda f: written(f, "s.yaml", as_yaml(SPEC)), read_spec, "yaml", "^schemes$|^tasks$|kind$"
    ),
    *(Format(name, lambda f, s=spec: written(f, "s.yaml", s), read_spec, "") for name, spec in EXAMPLES.items()),
    Format("results", lambda f: written(f, "r.gz", gzip.compress(as_json(RESULT))), read_archive, needed=KNOWN),
    Format("manifest", lambda f: written(f, "manifest.json", MANIFEST), _text),
    Format("scores", lambda f: written(f, "s.json", SHOWN), read_scores),
    Format("log", lambda f: written(f, "train.log", LOG), lambda p: read_curves(p, "loss"), "lines"),
    Format("documents", lambda f: written(f, "d.json", {"text": "a\nb", "id": 1}), _documents, needed="text"),
    Format("config.json", lambda f: written(f, "config.json", CONFIG), lambda p: read_config(p.parent)),
    Format(
        "index",
        _with(NOTHING, "model.safetensors.index.json", WEIGHTS),
        lambda p: weight_files(p.parent),
        needed="^weight_map$",
    ),
    *map(_table, ("RTE", "STS-B", "CoLA")),
    Format("CSV", lambda f: written(f, "t.csv", b"a,b\n1,x\n2,y\n"), read_csv, "lines"),
    Format("record", _record, lambda p: ResumeLog(p, {"a": 1}), "lines"),
    Format("averaged", _plain, lambda p: relpos("average", p, p, "--out", p.parent / "mean.pt"), ""),
    Format("converted", _plain, lambda p: _convert(p, "learned+m4"), ""),
    Format("Transformer-XL", _released("model.pt", True), _convert, ""),
    Format("older Transformer-XL", _released("model.pt", False), _convert, ""),
    Format("cache.pt of Transformer-XL", _released("cache.pt", False), _convert, ""),
]


@pytest.fixture
def little_memory():
    """Three gigabytes more than this process has: a broken pickle may ask for any number, which the system promises."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_broken_file_is_one_line(tmp_path: Path, form: Format) -> None:
    valid = tmp_path / "valid"
    valid.mkdir()
    name = form.write(valid).relative_to(valid)
    shutil.copytree(valid, tmp_path / "read")
    assert outcome(lambda: form.read(tmp_path / "read" / name), ()) == ("accepted", "")
    counts: Counter = Counter()
    wrong = []
    for number in range(NUMBER):
        pick = random.Random(f"{form.name} {number}")
        path = tmp_path / str(number) / name
        shutil.copytree(valid, tmp_path / str(number))
        done, place = mutate(path, form.kind, pick)
        how, said = outcome(lambda path=path: form.read(path), (path.name, str(path.parent)))
        how = "silent" if how == "accepted" and place and re.search(form.needed, place) else how
        counts[how] += 1
        if how not in ("accepted", "refused"):
            wrong.append(f"{how}: {done}: {said}")
        shutil.rmtree(tmp_path / str(number))
    print(f"{form.name}: {dict(counts)}")
    assert not wrong, "\n".join(dict.fromkeys(wrong[:40]))


GIVEN = "0 -1 1 3 2.5 1e999 nan -inf None [] auto none heads layers both on off paper 10**9 1_0".split()
GIVEN += ["é 日", "\0", " 3 "]
SCHEMES = "t5 m4 m4m rope tupe deberta+t5 rope/none fire kerple fox".split()


def test_malformed_options() -> None:
    """Values of position options that a recipe or a command line may have."""
    shape = AttentionShape(embed_dim=16, num_heads=2, max_positions=64, seed_name="test")
    known = [part.name for part in fields(PositionConfig)]
    for number in range(NUMBER):
        pick = random.Random(f"options {number}")
        text = "".join(
            chr(pick.choice((pick.randrange(128), pick.randrange(0xD800)))) for _ in range(pick.randrange(9))
        )
        scheme = pick.choice([*SCHEMES * 4, *GIVEN, text])
        options = {name: pick.choice([*GIVEN, text]) for name in pick.sample(known, pick.randrange(4))}
        config = PositionConfig(**{"position_scheme": scheme} | options)
        short = [name.removeprefix("position_") for name in options]
        names = ("position scheme", *short, *(name.replace("_", "-") for name in short), scheme, *options.values())
        how, said = outcome(lambda config=config: resolve(config, shape, "translation"), names)
        assert how in ("accepted", "refused"), (scheme, options, said)
