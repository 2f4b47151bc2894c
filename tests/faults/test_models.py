"""Models and binary data whose structure is broken: checkpoints, dict.txt, .idx and .bin.

A valid file loses, repeats or renames a part, or has one of another type, shape or value. Every command that reads the
format must do its work, or end in one line that names the file. RELPOS_FAULTS sets how many, as in test_faults.py.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import USER_DIR, segment_corpus
from helpers import commands as cli
from helpers.commands import QUIET, relpos
from helpers.fault_jobs import Inputs
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE
from relpos_fairseq.patches.training import described, is_about_input

pytestmark = pytest.mark.slow
SIZE = os.environ.get("RELPOS_FAULTS", "")
COUNT = 3000 if SIZE == "full" else 100 * int(SIZE or 0) or 7  # of each kind of file: every command has one
SECONDS, BYTES = 30, 3 << 30  # that a command may take
JUNK = [None, True, -1, 0, 7, 1.5, math.nan, math.inf, 10**30, "", "x", "a\nb", b"x", [], ["x"], {}, {"x": 1}, ()]
JUNK += ["${x}", "???", torch.zeros(2), argparse.Namespace(x=1), "None", [None]]


@dataclass(frozen=True)
class Command:
    """What reads a file: of fairseq by its name, else relpos."""

    tool: str
    arguments: tuple[object, ...]

    def __call__(self) -> tuple[int, str, str]:
        """Return its status, what it printed, and its last line of an error; a traceback has the status 1."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if self.tool == "relpos":
                    status = relpos(*self.arguments)
                    lines = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
                    return status, out.getvalue(), "".join(lines) if len(lines) < 2 else "\n".join(lines)
                return 0, cli.call(self.tool, *map(str, self.arguments)), ""
            except BaseException as error:
                said = described(error)
                if said is None and isinstance(error, ValueError) and is_about_input(error.__traceback__):
                    said = str(error)
                place = error.__traceback__
                while place.tb_next:
                    place = place.tb_next
                where = f"{place.tb_frame.f_code.co_filename[-60:]}:{place.tb_lineno}"
                return (1, "", f"{type(error).__name__}: {error} ({where})") if said is None else (2, "", said)


def outcome(run: Command, named: tuple[str, ...], expected: str | None) -> tuple[str, str]:
    """Return what a command made of a broken file, run in a fork: a word, and what it said."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            sys.stdin = io.StringIO("w1 w2\n")
            with os.fdopen(write, "w") as file:
                json.dump(run(), file)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not told:
        return "crash", f"ended with {status}"
    status, printed, said = json.loads(told)
    if status == 0:
        return ("accepted" if expected in (None, results(printed)) else "other result"), results(printed)
    if status == 1:
        return "traceback", said
    if "\n" in said or not said:
        return "lines", said
    return ("named" if any(name in said for name in named) else "unnamed"), said


def results(printed: str) -> str:
    """Return what a command's output says of its results: translations and losses, without times."""
    logged = re.findall(r"^[HS]-.*|[Ll]oss(?: [(]base 2[)])?[ :=|]+[\d.]+", printed, re.MULTILINE)
    return "\n".join(logged) if logged else printed


def campaign(
    name: str, count: int, jobs: dict[Command, str], named: tuple[str, ...], broken: Callable[..., str]
) -> list[str]:
    """Break a file `count` times, and let commands read it in turn; prints how they ended, and returns what is wrong.

    Args:
        name: for what is printed.
        count: how many times.
        jobs: what each command prints of the valid file.
        named: the names of which an error must have one.
        broken: writes a broken file, and returns what is wrong with it.
    """
    chance, found, wrong = random.Random(name), Counter(), []
    for number in range(count):
        how, run = broken(chance), list(jobs)[number % len(jobs)]
        word, said = outcome(run, named, jobs[run])
        found[word] += 1
        line = f"{word}: {run.tool} {run.arguments[0] if run.tool == 'relpos' else ''} {how}: {said}"
        if word not in ("accepted", "named", "other result"):
            wrong.append(line)
        if os.environ.get("RELPOS_FAULTS_LOG"):
            with open(os.environ["RELPOS_FAULTS_LOG"], "a") as log:
                print(name, line, file=log)
    print(f"\n{name}: {dict(found)}")
    return wrong


# Checkpoints


def broken_state(state: dict[str, Any], chance: random.Random) -> tuple[Any, str]:
    """Return a copy of a checkpoint with one or two parts that are missing, renamed, repeated or of another type."""
    state, told = copy.deepcopy(state), []
    for _ in range(chance.choice((1, 1, 1, 2))):
        owner: Any = state
        place = list(chance.choice(WHERE))
        while True:
            known = list(owner) if isinstance(owner, dict) else range(len(owner))
            key = place.pop(0) if place and place[0] in known else chance.choice(known)
            value = owner[key]
            if not (isinstance(value, (dict, list)) and value) or (not place and chance.random() < 0.1):
                break
            owner = value
        how = chance.choice(("tensor",) if isinstance(value, torch.Tensor) and chance.random() < 0.7 else HOW)
        told.append(f"{how} {key}")
        if how == "remove":
            del owner[key]
        elif how == "rename" and isinstance(owner, dict):
            owner[chance.choice((f"{key}x", "x", 3))] = owner.pop(key)
        elif how == "repeat" and isinstance(owner, dict):
            owner[f"{key}.x"] = value
        elif how == "nest":
            owner[key] = chance.choice(([value], {"x": value}))
        elif how == "tensor":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                word = chance.choice(list(TENSORS))
                told[-1] += f" {word}"
                owner[key] = TENSORS[word](value)
        else:
            owner[key] = chance.choice(JUNK)
            told[-1] += f" {owner[key]!r}"
    if chance.random() < 0.02:
        return chance.choice((list(state), state["model"] if "model" in state else 3, None, "x", {})), "another whole"
    return state, ", ".join(told)


WHERE = ((), ("cfg", "model"), ("cfg", "model"), ("cfg", "model"), ("cfg", "task"), ("cfg",), ("model",), ("model",))
WHERE += (("extra_state",), ("optimizer_history", 0), ("last_optimizer_state",), ("task_state",), ("cfg", "criterion"))
HOW = ("remove", "rename", "repeat", "nest", *("junk",) * 4)
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda t: t.t().contiguous() if t.dim() == 2 else t[None],
    "shorter": lambda t: t[:-1] if t.dim() else t[None],
    "longer": lambda t: torch.cat([t, t]) if t.dim() else t[None],
    "flat": lambda t: t.flatten(),
    "scalar": lambda t: t.flatten()[0].clone() if t.numel() else t,
    "empty": lambda t: t.flatten()[:0],
    "int": lambda t: t.int(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "sparse": lambda t: t.float().to_sparse(),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "expanded": lambda t: t.flatten()[:1].expand(t.numel()).reshape(t.shape) if t.numel() else t,
    "view": lambda t: torch.cat([t.flatten()] * 2)[t.numel() :].view(t.shape),
    "nan": lambda t: torch.full_like(t.float(), math.nan),
    "inf": lambda t: torch.full_like(t.float(), math.inf),
    "list": lambda t: t.tolist(),
    "array": lambda t: t.numpy(),
    "meta": lambda t: t.to("meta"),
    "requires grad": lambda t: t.float().requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t.float()),
}


def fuzz_checkpoint(name: str, good: Path, path: Path, jobs: list[Command]) -> None:
    state = cli.load(good)

    def broken(chance: random.Random) -> str:
        made, how = broken_state(state, chance)
        torch.save(made, path)
        shutil.rmtree(path.parents[1] / "out", ignore_errors=True)
        return how

    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)
    named = (path.name, "max_positions=")  # a length among its options is named by the flag that raises it
    wrong = campaign(name, COUNT, valid(jobs), named, broken)
    assert not wrong, "\n".join(wrong)


def valid(jobs: list[Command]) -> dict[Command, str]:
    """Return what every command prints of valid files."""
    found = {run: outcome(run, (), None) for run in jobs}
    refused = [(run, said) for run, said in found.items() if said[0] != "accepted"]
    assert not refused, refused
    return {run: printed for run, (_, printed) in found.items()}


def fairseq(tool: str, data: Path, *more: object) -> Command:
    return Command(tool, (data, "--user-dir", USER_DIR, *QUIET, *more))


def test_checkpoints_of_translators(inputs, tmp_path):
    path, out, data = tmp_path / "c" / "broken.pt", tmp_path / "out", inputs.translation
    line = tmp_path / "line.txt"
    line.write_text("w1 w2\n")
    jobs = [
        Command("relpos", ("translate", path, line, "--data", data, "--cpu")),
        Command("relpos", ("average", path, path, "--out", out / "mean.pt")),
        Command("relpos", ("plot", path, "--data", data, "--out", out / "plot")),
        fairseq("generate", data, "--path", path, "--max-tokens", "400", "--beam", "2", "--max-len-b", "3"),
        fairseq("validate", data, "--path", path, "--task", "translation", "--max-tokens", "400"),
        Command("train", training(inputs, tmp_path / "save", "--restore-file", path, "--max-update", "3")),
        Command("train", training(inputs, tmp_path / "save", "--finetune-from-model", path, "--max-update", "1")),
    ]
    fuzz_checkpoint("translator", inputs.translator, path, jobs)


def training(inputs: Inputs, out: Path, *more: object) -> tuple[object, ...]:
    corpus = cli.Corpus(inputs.translation.parent / "raw", inputs.translation)
    return tuple(cli.train_arguments(corpus, out, *more, "--no-save", "--disable-validation"))


@pytest.mark.nightly
def test_checkpoints_of_language_models(inputs, tmp_path):
    path, out, data = tmp_path / "c" / "broken.pt", tmp_path / "out", inputs.stream
    resume = segment_corpus.arguments(data, tmp_path / "save", "--max-update", "3", "--no-save")
    jobs = [
        Command("relpos", ("sample", path, "--data", data, "--prompt", "a b", "--tokens", "3", "--cpu")),
        Command("relpos", ("evaluate", "lm", path, "--data", data, "--split", "valid", "--tokens", "20")),
        Command("relpos", ("average", path, path, "--out", out / "mean.pt")),
        fairseq("eval_lm", data, "--path", path, "--gen-subset", "valid", "--batch-size", "2"),
        fairseq("validate", data, "--path", path, *segment_corpus.TASK, "--batch-size", "2"),
        Command("train", (*resume, "--restore-file", path)),
    ]
    fuzz_checkpoint("language model", inputs.lm, path, jobs)


def test_checkpoints_of_encoders(inputs, tmp_path):
    path, out, data = tmp_path / "c" / "broken.pt", tmp_path / "out", inputs.packed
    resume = (data, *ARCH, *MASKED_LM, *OPTIMIZE, "--tokens-per-sample", "24", "--no-save", "--disable-validation")
    line = tmp_path / "line.txt"
    line.write_text("w1 <mask>\n")
    jobs = [
        Command("relpos", ("convert", path, "--to", "same", "--out", out / "converted")),
        Command("relpos", ("export", "transformers", path, "--out", out / "served", "--data", data)),
        Command("relpos", ("fill", path, line, "--data", data, "--cpu")),
        fairseq("validate", data, "--path", path, "--batch-size", "8"),
        Command("train", (*resume, "--restore-file", path, "--max-update", "3")),
        Command("train", (*resume, "--finetune-from-model", path, "--max-update", "1")),
    ]
    fuzz_checkpoint("encoder", inputs.checkpoint, path, jobs)


# Dictionaries


def broken_lines(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return a dict.txt with a line that is none."""
    lines = content.split(b"\n")[:-1]
    at = chance.randrange(len(lines))
    word, count = lines[at].split(b" ")
    how = chance.choice(list(LINES))
    lines[at : at + 1] = LINES[how](word, count)
    if how == "empty":
        return b"", how
    return b"\n".join(lines) + (b"" if chance.random() < 0.1 else b"\n"), f"{how} {at}"


LINES: dict[str, Callable[[bytes, bytes], list[bytes]]] = {
    "empty": lambda w, c: [],
    "no count": lambda w, c: [w],
    "no word": lambda w, c: [b" " + c],
    "count alone": lambda w, c: [c],
    "blank": lambda w, c: [b""],
    "a count that is none": lambda w, c: [w + b" x"],
    "negative": lambda w, c: [w + b" -3"],
    "huge": lambda w, c: [w + b" " + b"9" * 400],
    "endless": lambda w, c: [w + b" " + b"9" * 5000],
    "decimal": lambda w, c: [w + b" 1.5"],
    "underscores": lambda w, c: [w + b" 1_0"],
    "arabic": lambda w, c: [w + " ٣".encode()],
    "tab": lambda w, c: [w + b"\t" + c],
    "twice": lambda w, c: [w + b" " + c] * 2,
    "overwritten": lambda w, c: [w + b" " + c, w + b" " + c + b" #fairseq:overwrite"],
    "only a flag": lambda w, c: [b"#fairseq:overwrite"],
    "special": lambda w, c: [b"<pad> 1"],
    "NUL": lambda w, c: [b"\0" + w + b" " + c],
    "lone CR": lambda w, c: [w + b"\r" + w + b" " + c],
    "CRLF": lambda w, c: [w + b" " + c + b"\r"],
    "latin-1": lambda w, c: [b"\xe9 1"],
    "UTF-16": lambda w, c: [w.decode().encode("utf-16")],
    "mark": lambda w, c: ["\ufeff".encode() + w + b" " + c],
    "separator": lambda w, c: [w + "\u2028 ".encode() + c],
    "missing": lambda w, c: [],
    "more": lambda w, c: [w + b" " + c, b"new 1"],
    "spaces": lambda w, c: [w + b" a b " + c],
}


def breaking(place: Path, breaks: Callable, count: int, jobs: dict[Command, str], named: tuple[str, ...]) -> list[str]:
    """Break a file of bytes `count` times, as `campaign` does, and restore it; returns what is wrong."""
    good = place.read_bytes()

    def broken(chance: random.Random) -> str:
        content, how = breaks(good, chance)
        place.write_bytes(content)
        return how

    wrong = campaign(f"{' '.join(run.tool for run in jobs)} {place.name}", count, jobs, named, broken)
    place.write_bytes(good)
    return wrong


@pytest.mark.nightly
def test_dictionaries(reading):
    pair, stream, of_pairs, of_streams = reading
    places = {pair / "dict.src.txt": of_pairs, pair / "dict.tgt.txt": of_pairs, stream / "dict.txt": of_streams}
    wrong: list[str] = []
    for place, jobs in places.items():
        # A dictionary that is another one contradicts the checkpoint, its folder's other half, or a flag.
        named = (place.name, str(place.parent), "checkpoint_last.pt", "--share-all-embeddings")
        wrong += breaking(place, broken_lines, -(-COUNT // 2), jobs, named)
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def reading(inputs, tmp_path_factory) -> tuple[Path, Path, dict[Command, str], dict[Command, str]]:
    """Pairs and a stream, and of each the commands that read it, with what they print."""
    out = tmp_path_factory.mktemp("reading")
    pair = Path(shutil.copytree(inputs.translation, out / "pair"))
    stream = Path(shutil.copytree(inputs.stream, out / "stream"))
    resume = segment_corpus.arguments(stream, out / "save", "--max-update", "1", "--no-save")
    line = out / "line.txt"
    line.write_text("w1 w2\n")
    corpus = cli.Corpus(pair.parent / "raw", pair)
    jobs = [
        Command("relpos", ("translate", inputs.translator, line, "--data", pair, "--cpu")),
        fairseq("generate", pair, "--path", inputs.translator, "--max-tokens", "400", "--max-len-b", "3"),
        fairseq("validate", pair, "--path", inputs.translator, "--task", "translation", "--max-tokens", "400"),
        Command("train", tuple(cli.train_arguments(corpus, out / "save", "--no-save", "--max-epoch", "1"))),
        Command("relpos", ("evaluate", "lm", inputs.lm, "--data", stream, "--split", "valid", "--tokens", "20")),
        fairseq("eval_lm", stream, "--path", inputs.lm, "--gen-subset", "valid", "--batch-size", "2"),
        fairseq("validate", stream, "--path", inputs.lm, *segment_corpus.TASK, "--batch-size", "2"),
        Command("train", (*resume,)),
    ]
    return pair, stream, valid(jobs[:4]), valid(jobs[4:])


# Binarised text


def broken_index(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return an .idx with a header, a size or a pointer that is wrong."""
    count = struct.unpack_from("<Q", content, 18)[0]
    sizes = np.frombuffer(content, np.int32, count, 26).copy()
    pointers = np.frombuffer(content, np.int64, count, 26 + 4 * count).copy()
    header = {"magic": b"MMIDIDX\0\0", "version": 1, "code": content[17], "count": count}
    at, value = chance.randrange(count), chance.choice((-1, 0, 1, 2, 3, 1000, 2**31 - 1))
    wrong = {
        "magic": (b"MMIDIDX\0x", b"TNTIDX\0\0\0", b"HUFFIDX\0\0", b"\0" * 9),
        "version": (0, 2, 2**63),
        "code": (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 255),
        "count": (0, 1, count - 1, count + 1, 2**31, 2**62, 2**64 - 1),
    }
    how = chance.choice((*wrong, "size", "pointer", "cut", "more", "swap", "zero"))
    if how in wrong:
        header[how] = chance.choice(wrong[how])
    elif how == "size":
        sizes[at] = value
    elif how == "pointer":
        pointers[at] = chance.choice((value, -(2**62), 2**62, int(pointers[at]) + 1, int(pointers[at]) + 2))
    elif how == "swap":
        pointers = pointers[::-1]
    elif how == "zero":
        pointers[:] = 0
    magic, *numbers = header.values()
    made = magic + struct.pack("<QBQ", *numbers) + sizes.tobytes() + pointers.tobytes()
    if how == "cut":
        made = made[: chance.randrange(len(made))]
    elif how == "more":
        made += bytes(chance.randrange(1, 9))
    return made, f"{how} {at} {value}"


def broken_ids(content: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return a .bin that is cut, longer, or has ids that are none."""
    how = chance.choice(("cut", "empty", "more", "ids", "ids", "every"))
    ids = np.frombuffer(content, np.uint16).copy()
    if how == "cut":
        return content[: chance.randrange(len(content))], how
    if how == "empty":
        return b"", how
    if how == "more":
        return content + bytes(chance.randrange(1, 9)), how
    value = chance.choice((30, 40, 1000, 65535))
    ids[chance.randrange(len(ids)) :: 1 if how == "every" else len(ids)] = value
    return ids.tobytes(), f"{how} {value}"


def test_binarised_text(reading):
    pair, stream, of_pairs, of_streams = reading
    wrong: list[str] = []
    for job, printed in {**of_pairs, **of_streams}.items():
        if job.arguments[0] == "translate":  # which reads none
            continue
        split = {"generate": "test", "train": "train"}.get(job.tool, "valid")
        stem = pair / f"{split}.src-tgt.src" if job in of_pairs else stream / split
        for ending, breaks in (("idx", broken_index), ("bin", broken_ids)):
            wrong += breaking(Path(f"{stem}.{ending}"), breaks, -(-COUNT // 7), {job: printed}, (stem.name,))
    assert not wrong, "\n".join(wrong)
