"""Define the task of segment recurrence: what memory is worth, how far back it is used, and what it saves (Dai 2019).

A language model is trained on segments, each with the memory of those before it, and read with several lengths of
memory; `mem-len: 0` among a scheme's flags trains without. The last checkpoint counts: nothing is chosen.

Relative effective context length (Dai et al. 2019, arXiv:1901.02860, appendix C). l_i(c, t) is the loss of model i of a
group at token t with a context of c tokens, read in windows without memory:

    b(c, t)    = min_i l_i(c, t)
    f_i(c, c') = mean over T of min(b(c, t), l_i(c', t))        T: the share r of all t with the largest b(c, t)
    g_i(c, c') = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)

Beginning with the shortest c and c' = c + step, c grows by a step as long as g_i(c, c') >= 0.01; where it ends is the
model's length.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, TypedDict

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import sha256_of, write_json
from relpos_fairseq.io.indexed import read_indexed
from relpos_fairseq.io.processes import key_of
from relpos_fairseq.io.reading import Amount, Count, read_json
from relpos_fairseq.lab.comparison.scores import BLOCK, Packed, of_predictions, pack, unpack
from relpos_fairseq.lab.comparison.tasks.base import HASHES, Extra, Scored, Task, Workspace, kind

ROWS = 4  # rows or windows that are read together
SCALE = 100  # nats are kept in hundredths, whose rounding is no bias: every prediction of a run takes 90 kB
SHARES = (0.1, 0.5, 1.0)  # r of the effective context
GAIN = 0.01  # of the effective context
TRAINED = "as trained"  # the set that each model reads with the memory of its training
WINDOWS = "windows"  # the set that is read without memory


class _Timed(TypedDict):
    """What `beside_window` returns."""

    memory: Amount
    window: Amount
    largest: Amount


class _Notes(TypedDict):
    """What a set keeps of every prediction."""

    contexts: list[Count]  # of memory, or of the windows
    hundredths: Packed  # (C, N) of a nat, of N predictions with each length, as differences to the length before
    timed: list[_Timed]


@kind("memory")
@dataclass(frozen=True, kw_only=True)
class SegmentMemory(Task):
    """A language model with memory over segments, on a folder of `relpos prepare lm`."""

    unit: ClassVar[str] = "tokens of memory"
    default: ClassVar[dict] = {
        "task": "segment_language_modeling",
        "arch": "relpos_transformer_xl_tiny",
        "dropout": 0.0,
        "criterion": "relpos_cross_entropy",
        "max-tokens": False,
        "batch-size": 32,
        "max-valid-steps": 32,
        "lr": 2e-3,
    }

    noted: ClassVar[Any] = _Notes

    data: Path  # the folder of `relpos prepare lm`
    segment: int = 64  # tokens
    memory: int = 128  # tokens, in training
    times: tuple[Count, ...] = (0, 1, 2, 4, 8)  # lengths of memory in the test, as multiples of `memory`
    predictions: int = 8192  # the last of the test, scored with every memory
    step: int = 32  # tokens, by which the windows without memory grow
    windows: int = 20  # how many lengths they have
    timed: int = 3  # segments that are timed beside a sliding window; 0: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(self.times))
        least = {"segment": 2, "memory": 1, "predictions": BLOCK, "step": 2, "windows": 1, "timed": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be >= {value}, got {getattr(self, name)}")
        if not self.times or len({*self.times}) < len(self.times):
            raise ValueError(f"times must be different whole numbers >= 0, got {list(self.times)}")

    def sets(self) -> tuple[str, ...]:
        return TRAINED, *(f"memory {times * self.memory}" for times in self.times), WINDOWS

    def inputs(self) -> list[Path]:
        files = [f"{split}.{ending}" for split in ("train", "valid", "test") for ending in ("bin", "idx")]
        return [self.data / "dict.txt", *(self.data / name for name in files), *self.data.glob("*.documents.npy")]

    def hash_inputs(self) -> str:
        """Return a hash of the files by name: documents may be known of any of the splits."""
        return key_of({path.name: HASHES.of(path) for path in self.inputs()})

    def make(self, folder: Path) -> None:
        """Link the data; a test too short for what is timed is refused before anything is trained."""
        tokens, needed = int(read_indexed(self.data / "test").sizes.sum()), max(self.times) * self.memory
        needed += self.segment * self.timed + 1
        if self.timed and tokens < needed:
            raise UserError(f"{self.data} has a test of {tokens:,} tokens, and timing needs {needed:,}: write timed: 0")
        (folder / "bin").symlink_to(self.data.absolute(), target_is_directory=True)

    def hash_data(self, folder: Path) -> str:
        return key_of([sha256_of(path) for path in sorted(self.inputs())])

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags."""
        return {"tokens-per-sample": self.segment, "mem-len": self.memory} | super().flags(scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        """Score the last predictions of the test with one length of memory, or in windows without."""
        place = workspace.folder / f"{name}.json"

        def work() -> None:
            from relpos_fairseq.evaluation.language_model import load_subject

            subject = load_subject(workspace.model, workspace.data / "bin", "test")
            length = subject.trained_memory if name == TRAINED else None if name == WINDOWS else int(name.split()[1])
            found = self.in_windows(subject) if length is None else self.with_memory(subject, length)
            if name == f"memory {max(self.times) * self.memory}":
                last, segments = len(subject.tokens), range(self.timed)
                found["timed"] = [beside_window(subject, last, length, self.segment, number) for number in segments]
            write_json(place, found, renews=True)

        workspace.in_child(name, work)
        notes = read_json(place, _Notes)
        nats = losses_of(notes)[-1]
        rows = of_predictions(nats)
        return Scored(np.full(len(rows), notes["contexts"][-1]), {"perplexity": rows}, dict(notes))

    def with_memory(self, subject: Any, length: int) -> _Notes:
        """Return the loss of every prediction with a length of memory."""
        from relpos_fairseq.evaluation.language_model import last_targets, score_with_memory

        targets = last_targets(subject, min(self.predictions, len(subject.tokens) - 1))
        score = score_with_memory(subject, targets, self.segment, length, ROWS)
        return {"contexts": [length], "hundredths": hundredths([score.each]), "timed": []}

    def in_windows(self, subject: Any) -> _Notes:
        """Return the loss of the last quarter of the predictions in windows without memory, of each length."""
        from relpos_fairseq.evaluation.language_model import last_targets, score_with_windows

        targets = last_targets(subject, min(max(self.predictions // 4, BLOCK), len(subject.tokens) - 1))
        lengths = [self.step * (number + 1) for number in range(self.windows)]
        found = [score_with_windows(subject, targets, length, self.step // 2, ROWS).each for length in lengths]
        return {"contexts": lengths, "hundredths": hundredths(found), "timed": []}

    def extras(self, runs: Mapping[str, Mapping[int, dict]]) -> list[Extra]:
        """Return the tables of the effective context, and of the time of evaluation."""
        return [self.context_table(runs), *([self.time_table(runs)] if self.timed else [])]

    def context_table(self, runs: Mapping[str, Mapping[int, dict]]) -> Extra:
        """Return the effective context of each scheme, of every seed that all have; the schemes are the group."""
        seeds = sorted(set.intersection(*(set(own) for own in runs.values())))
        cells: dict[str, list[str]] = {scheme: [] for scheme in runs}
        groups = [np.stack([losses_of(own[seed]["sets"][WINDOWS]) for own in runs.values()]) for seed in seeds]
        for share in SHARES:
            found = [effective_contexts(group, share) for group in groups]
            for number, own in enumerate(cells.values()):
                own.append(" ".join(str(self.step * (steps[number] + 1)) for steps in found))
        about = f"seeds {', '.join(map(str, seeds))} in turn" if seeds else "no seed that every scheme has"
        return Extra(
            f"Relative effective context length, tokens of {self.step} to {self.step * self.windows} ({about})",
            ("scheme", *(f"r = {share:g}" for share in SHARES)),
            [[scheme, *own] for scheme, own in cells.items()],
        )

    def time_table(self, runs: Mapping[str, Mapping[int, dict]]) -> Extra:
        """Return what a prediction takes with the longest memory and in a sliding window, in the median."""
        longest, rows = f"memory {max(self.times) * self.memory}", []
        for scheme, own in runs.items():
            some = [row for run in own.values() for row in run["sets"][longest]["timed"]]
            cells = [f"{1000 * median(row[part] for row in some):.3g}" for part in ("memory", "window")]
            ratio, largest = median(row["window"] / row["memory"] for row in some), max(row["largest"] for row in some)
            rows.append([scheme, str(len(some)), *cells, f"{ratio:,.0f}", f"{largest:.1e}"])
        return Extra(
            f"Evaluation with {longest}: milliseconds a prediction, beside a sliding window of the same context",
            ("scheme", "segments", "memory", "window", "ratio", "largest difference in nats"),
            rows,
        )


def hundredths(nats: Sequence[np.ndarray]) -> Packed:
    """Return the nats (N,) of each of C lengths as (C, N) whole hundredths, each less those of the length before."""
    return pack(np.diff(np.round(np.stack(nats) * SCALE), axis=0, prepend=0))


def losses_of(notes: Mapping[str, Any]) -> np.ndarray:
    """Return the nats (C, N) of every prediction with each of C lengths."""
    return np.cumsum(unpack(notes["hundredths"]), 0) / SCALE


def effective_contexts(losses: np.ndarray, share: float) -> list[int]:
    """Return for each of M models by how many steps the shortest context grows to its effective one.

    Args:
        losses: (M, C, N) nats of N tokens under C contexts, each a step longer than the one before.
        share: of the tokens, those that are hardest under the shorter context.
    """
    found = []
    for own in losses:
        steps = 0
        while steps + 1 < len(own):
            least = losses[:, steps].min(0)
            hardest = np.argsort(-least, kind="stable")[: max(1, round(share * len(least)))]
            before, after = (np.minimum(least, own[place])[hardest].mean() for place in (steps, steps + 1))
            if not 1 - np.exp(after - before) >= GAIN:  # nor where it is no number
                break
            steps += 1
        found.append(steps)
    return found


def beside_window(subject: Any, stop: int, length: int, segment: int, number: int) -> _Timed:
    """Return the seconds a prediction of a segment with memory and in a sliding window, and the scores' difference.

    The segment's context begins `length` tokens before it, so memory and each prediction's window hold the same tokens.

    Args:
        subject: model and text.
        stop: where the text ends; the segment is the last but `number` of it.
        length: tokens of memory.
        segment: tokens.
        number: of the segment, backwards.
    """
    import torch

    from relpos_fairseq.evaluation.language_model import log_likelihood, read_rows, targets_of

    start, memory, model = stop - 1 - segment * (number + 1), None, subject.model
    model.mem_len = length
    with torch.no_grad():
        for place in range(start - length, start, segment):
            memory = read_rows(subject, [place], min(segment, start - place), memory)[1]["memory"]
        began = time.perf_counter()
        features, _ = read_rows(subject, [start], segment, memory)
        nats = log_likelihood(subject, features, targets_of(subject, [start], segment))[0]
        between, model.mem_len = time.perf_counter(), 0
        slid = []
        for place in range(segment):
            features, _ = read_rows(subject, [start - length], length + place + 1)
            slid.append(log_likelihood(subject, features[:, -1:], targets_of(subject, [start + place], 1))[0])
        ended = time.perf_counter()
    return {
        "memory": (between - began) / segment,
        "window": (ended - between) / segment,
        "largest": float((nats - torch.cat(slid)).abs().max()),
    }
