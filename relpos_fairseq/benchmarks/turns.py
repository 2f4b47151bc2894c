"""Measuring column by column: all candidates of one length and mode in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from relpos_fairseq.benchmarks.candidates import BASELINE, Candidate, NoPositions, Scheme, runner
from relpos_fairseq.benchmarks.correctness import MOST, check, check_step
from relpos_fairseq.benchmarks.flex import Flex
from relpos_fairseq.benchmarks.layer import Layer
from relpos_fairseq.benchmarks.report import Log, progress
from relpos_fairseq.benchmarks.settings import INPUT_SCHEMES, Setting
from relpos_fairseq.benchmarks.timing import Times, peak_mebibytes, time_in_turns
from relpos_fairseq.schemes import parse_hybrid

NAIVE = {"cpu": 1 << 27, "cuda": 1 << 31}  # elements of the formula's largest tensor, at most


@dataclass
class Run:
    """What a command measures, and what it has found.

    Args:
        args: the command line.
        where: columns that say on what machine and by which versions.
        log: rows.
        say: prints a line.
    """

    args: argparse.Namespace
    where: dict
    log: Log
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    checked: int = 0
    worst: tuple[float, str] = (0.0, "")

    def column(self, setting: Setting, mode: str) -> dict:
        """What the rows of one column have in common."""
        view = "layer" if self.args.layer else "attention"
        return {**self.where, "view": view, **setting.columns(), "mode": mode}

    def note(self, text: str) -> None:
        """Keep a remark for the table's foot."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)


def measure(run: Run, setting: Setting) -> None:
    """Check and time all candidates of a length, column by column."""
    labels = None
    waiting = list(run.args.modes)
    if run.log.rows:
        labels = {candidate.label for candidate in candidates_of(run, setting)}
        waiting = [mode for mode in waiting if not _is_complete(run, setting, mode, labels)]
    if not waiting:
        return
    candidates = checked(run, candidates_of(run, setting), waiting)
    for mode in waiting:
        served = [_viewed(run, candidate) for candidate in candidates]
        served = [candidate for candidate in served if _serves(run, candidate, mode)]
        served = [candidate for candidate in served if _fits(run, candidate, mode)]
        column = run.column(setting, mode)
        rows = _memory(served) if mode == "memory" else _times(run, served, mode)
        if mode != "decode":  # whose steps have a way of their own
            used = {candidate.label: _backend(candidate) for candidate in served}
            rows = [{**row, "backend": used[row["name"]]} for row in rows]
        run.log.rows = [row for row in run.log.rows if not _is_of(row, column)]
        run.log.add({**column, **row} for row in rows)


def candidates_of(run: Run, setting: Setting) -> list[Candidate]:
    """The baseline, then each scheme by us, by FlexAttention and by the formula."""
    found: list[Candidate] = [NoPositions(BASELINE, setting)]
    for name in run.args.schemes:
        found += [Scheme(name, setting, backend) for backend in run.args.backends]
        if run.args.flex and not run.args.layer:
            found.append(Flex(name, setting))
        if run.args.naive and name not in INPUT_SCHEMES:
            if _naive_elements(name, setting) <= NAIVE[setting.device.type]:
                found.append(Scheme(name, setting, "reference"))
            else:
                run.note(f"{name}, naive: not at {setting.length}, for memory")
    return found


def checked(run: Run, candidates: list[Candidate], modes: list[str]) -> list[Candidate]:
    """The candidates that may be timed, each held against fp64.

    Raises:
        ValueError: one is wrong.
    """
    kept = []
    with progress(len(candidates), f"checking length {candidates[0].setting.length}") as bar:
        for candidate in candidates:
            if isinstance(candidate, Flex) and not _compiles(run, candidate):
                continue
            if getattr(candidate, "backend", "") != "reference":
                error = check(candidate, bool({"train", "memory"} & set(modes)))
                if "decode" in modes and not isinstance(candidate, Flex):
                    error = max(error, check_step(candidate))
                if isinstance(candidate, Flex) and error > MOST:
                    run.note(f"{candidate.label}: errs {error:.0f} times what the formula errs")
                else:
                    run.worst = max(run.worst, (error, candidate.label))
                run.checked += not isinstance(candidate, NoPositions)
            kept.append(candidate)
            bar.update()
    return kept


def _compiles(run: Run, candidate: Flex) -> bool:
    """Whether FlexAttention can express the scheme and be compiled here."""
    reason = candidate.refusal("forward")
    if reason is None:
        try:
            with torch.no_grad():
                candidate(*candidate.inputs())
        except Exception as error:  # a compiler's errors have no class in common
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
            reason = f"not compiled on this machine: {first}"
    if reason is not None:
        run.note(f"{candidate.label}: {reason}")
    return reason is None


def _backend(candidate: Candidate) -> str:
    """What evaluates a scheme's rows, `auto` resolved; of others, nothing."""
    scheme = getattr(candidate, "attention", candidate)  # of a layer
    ours = isinstance(scheme, Scheme) and not isinstance(scheme, Flex)
    return scheme.chosen if ours else ""


def _viewed(run: Run, candidate: Candidate) -> Candidate:
    return Layer(candidate) if run.args.layer else candidate


def _serves(run: Run, candidate: Candidate, mode: str) -> bool:
    reason = candidate.refusal(mode)
    if mode == "decode" and candidate.label.endswith("naive"):
        return False  # a step's formula is what the cache saves
    if reason is not None:
        run.note(f"{candidate.label.split(', ')[-1]}, {mode}: {reason}")
    return reason is None


def _fits(run: Run, candidate: Candidate, mode: str) -> bool:
    """Whether a GPU's memory holds the candidate; a CPU's is not tried out."""
    setting = candidate.setting
    if setting.device.type == "cpu":
        return True
    try:
        runner(candidate, "train" if mode == "memory" else mode)()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        run.note(f"{candidate.label}, {mode}: not at {setting.length}, out of memory")
        return False
    return True


def _is_of(row: dict, column: dict) -> bool:
    return all(str(row.get(name)) == str(value) for name, value in column.items())


def _is_complete(run: Run, setting: Setting, mode: str, labels: set[str]) -> bool:
    """Whether the log has a column's rows; what FlexAttention cannot do is missing there too."""
    had = {row["name"] for row in run.log.those(run.column(setting, mode))}
    return bool(had) and all(label in had for label in labels if "Flex" not in label)


def _times(run: Run, candidates: list[Candidate], mode: str) -> list[dict]:
    """A row each."""
    args, setting = run.args, candidates[0].setting
    total = len(candidates) * (args.rounds + 1)
    runs = {candidate.label: runner(candidate, mode) for candidate in candidates}
    with progress(total, f"{mode} {setting.length}") as bar:
        times, noisy = time_in_turns(runs, setting.device, args.rounds, args.seconds, bar.update)
    taken = sum(len(found.samples) for found in times.values())
    run.say(
        f"length {setting.length}, {mode}: {len(times[BASELINE].samples)} rounds, "
        f"{noisy} of {taken} samples on a machine that was not idle"
    )
    return [time_row(name, found, times[BASELINE]) for name, found in times.items()]


def time_row(name: str, found: Times, base: Times) -> dict:
    """A candidate's milliseconds, and its ratios to the baseline's."""
    return {
        "name": name,
        "ms": round(found.median, 4),
        "least_ms": round(found.least, 4),
        "spread": round(found.spread, 4),
        "ratio": round(found.median / base.median, 4),
        "least_ratio": round(found.least / base.least, 4),
        "samples": len(found.samples),
        "noisy": found.noisy,
    }


def _memory(candidates: list[Candidate]) -> list[dict]:
    """A row each: the peaks of training and of a forward pass, beyond the inputs."""
    rows = []
    setting = candidates[0].setting
    with progress(len(candidates), f"memory {setting.length}") as bar:
        for candidate in candidates:
            train = peak_mebibytes(runner(candidate, "train"), setting.device)
            forward = peak_mebibytes(runner(candidate, "forward"), setting.device)
            row = {"name": candidate.label, "MiB": train, "forward_MiB": forward}
            scheme = getattr(candidate, "attention", candidate)
            row["tables_MiB"] = scheme.table_mebibytes() if isinstance(scheme, Scheme) else 0.0
            rows.append({key: _rounded(value) for key, value in row.items()})
            bar.update()
    for row in rows:
        if rows[0]["MiB"] > 0:
            row["ratio"] = round(row["MiB"] / rows[0]["MiB"], 4)
    return rows


def _rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else round(value, 2)


def _naive_elements(name: str, setting: Setting) -> int:
    """Elements of the formula's largest tensor."""
    trilinear = any(member.replaces_content for member in parse_hybrid(name))
    pairs = setting.batch * setting.heads * setting.length**2
    return pairs * (setting.head_dim if trilinear else 1)
