"""Attention with positions beside attention without: all candidates of a length in turns."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch

from relpos_fairseq.attention import BACKENDS
from relpos_fairseq.benchmarks.attention_report import TITLES, key_of, report
from relpos_fairseq.benchmarks.candidates import BASELINE, MODES, Candidate, LayerCandidate, NoPositions, runner
from relpos_fairseq.benchmarks.checks import check_least, chosen_of, lengths_of, prepare_run, schemes_of
from relpos_fairseq.benchmarks.correctness import MOST, check, check_step
from relpos_fairseq.benchmarks.drawing import check_plot, draw_lengths
from relpos_fairseq.benchmarks.flex import Flex
from relpos_fairseq.benchmarks.instructions import in_words
from relpos_fairseq.benchmarks.published import LAYER
from relpos_fairseq.benchmarks.report import machine, progress, write_section
from relpos_fairseq.benchmarks.rows import RowLog, timed_rows
from relpos_fairseq.benchmarks.scheme_candidate import SchemeCandidate
from relpos_fairseq.benchmarks.settings import EVERY_LENGTH, AttentionSetting, has_formula, schemes_for, setting_of
from relpos_fairseq.benchmarks.timing import peak_mebibytes
from relpos_fairseq.schemes import parse_hybrid

OURS = [name for name in BACKENDS if name != "reference"]  # which is --naive
FORMULA = {"cpu": 1 << 27, "cuda": 1 << 31}  # elements of the formula's largest tensor, at most


@dataclass
class AttentionRun:
    """What a command measures, and what it has found."""

    args: argparse.Namespace  # the command line
    where: dict  # columns that say on what machine and by which versions
    log: RowLog  # rows
    notes: list[str] = field(default_factory=list)
    checked: int = 0
    worst: tuple[float, str] = (0.0, "")

    def column(self, setting: AttentionSetting, mode: str) -> dict:
        """Return what the rows of one column have in common."""
        view = "layer" if self.args.layer else "attention"
        return {**self.where, "view": view, **setting.columns(), "mode": mode}

    def note(self, text: str) -> None:
        """Keep a remark for the table's foot."""
        if text not in self.notes:
            self.notes.append(text)
            print(text, flush=True)


def benchmark(args: argparse.Namespace) -> None:
    """Check, time, print, write."""
    device = check_arguments(args)
    torch.manual_seed(1)
    words = machine(device, args.threads)
    where = {"machine": words.split(";")[0].replace(",", ""), "torch": torch.__version__}
    if device.type == "cpu":
        where["instructions"] = in_words()
        words = f"{words}; {where['instructions']}"
    print(words, flush=True)
    run, settings = AttentionRun(args, where, RowLog(args.csv, args.resume)), settings_of(args)
    for setting in settings:
        measure(run, setting)
    if run.checked:
        print(
            f"{run.checked} candidates right against fp64, values and gradients; largest error "
            f"{run.worst[0]:.2f} of what the formula in {args.dtype} may err ({run.worst[1]})"
        )
    columns = [run.column(setting, mode) for setting in settings for mode in args.modes]
    rows = [row for column in columns for row in run.log.those(column)]
    text = report(args, rows, run.notes, words)
    print(f"\n{text}", flush=True)
    if args.plot:
        modes = {TITLES[mode]: [r for r in rows if r["mode"] == mode] for mode in args.modes}
        draw_lengths(args.plot, modes, BASELINE, text.split(". Median")[0])
    if args.write:
        write_section(args.write, key_of(args), text)


def check_arguments(args: argparse.Namespace) -> torch.device:
    """Turn lists into lists, refuse what cannot be, and return the device."""
    every = args.lengths == "all"
    args.lengths = list(EVERY_LENGTH) if every else lengths_of(args.lengths, ", or all")
    args.modes = chosen_of("modes", args.modes, MODES)
    args.backends = chosen_of("backends", args.backends, OURS)
    args.schemes = schemes_of(args.schemes, schemes_for(args.causal, attention=True))
    args.clip = 0 if args.unclipped else args.clip
    if args.tokens is None:
        args.tokens = 2048 if args.device == "cpu" else 16384
    if args.published:
        set_published(args)
    check_least(args, 1, "tokens batch heads head_dim")
    check_least(args, 0, "clip")
    if args.layer and "decode" in args.modes:
        raise ValueError("--layer does not decode: leave decode out of --modes")
    check_plot(args.plot)
    return prepare_run(args)


def set_published(args: argparse.Namespace) -> None:
    """Put the shape of the published layer, which is a GPU's, into a command line's options."""
    if args.device != "cuda":
        raise ValueError("--published compares with times of a GPU: add --device cuda")
    vars(args).update(LAYER["setting"])
    args.lengths = [length for length in EVERY_LENGTH if length >= 128]
    args.schemes, args.modes = [LAYER["scheme"]], ["train", "forward", "memory"]


def settings_of(args: argparse.Namespace) -> list[AttentionSetting]:
    """Return one setting a length, shortest first."""
    batches = {n: args.batch or max(args.tokens // n, 1) for n in sorted(set(args.lengths))}
    return [setting_of(AttentionSetting, args, length=length, batch=batch) for length, batch in batches.items()]


def measure(run: AttentionRun, setting: AttentionSetting) -> None:
    """Check and time all candidates of a length, column by column."""
    waiting = list(run.args.modes)
    if run.log.rows:  # what FlexAttention cannot do is missing in a complete file too
        labels = [c.label for c in candidates_of(run, setting) if not isinstance(c, Flex)]
        waiting = [mode for mode in waiting if run.log.lacks(run.column(setting, mode), labels)]
    if not waiting:
        return
    candidates = checked(run, candidates_of(run, setting), waiting)
    for mode in waiting:
        served = [LayerCandidate(each) if run.args.layer else each for each in candidates]
        served = [each for each in served if _serves(run, each, mode) and _fits(run, each, mode)]
        rows = _memory(served) if mode == "memory" else _times(run, served, mode)
        if mode != "decode":  # whose steps have a way of their own
            used = {candidate.label: _backend(candidate) for candidate in served}
            rows = [{**row, "backend": used[row["name"]]} for row in rows]
        run.log.replace(run.column(setting, mode), rows)


def candidates_of(run: AttentionRun, setting: AttentionSetting) -> list[Candidate]:
    """Return the baseline, then each scheme by us, by FlexAttention and by the formula."""
    found: list[Candidate] = [NoPositions(BASELINE, setting)]
    for name in run.args.schemes:
        found += [SchemeCandidate(name, setting, backend) for backend in run.args.backends]
        if run.args.flex and not run.args.layer:
            found.append(Flex(name, setting))
        if run.args.naive and has_formula(name):
            if _formula_elements(name, setting) <= FORMULA[setting.device.type]:
                found.append(SchemeCandidate(name, setting, "reference"))
            else:
                run.note(f"{name}, naive: not at {setting.length}, for memory")
    return found


def _formula_elements(name: str, setting: AttentionSetting) -> int:
    """Return the elements of the formula's largest tensor."""
    trilinear = any(member.replaces_content for member in parse_hybrid(name))
    return setting.batch * setting.heads * setting.length**2 * setting.head_dim**trilinear


def checked(run: AttentionRun, candidates: list[Candidate], modes: list[str]) -> list[Candidate]:
    """Return the candidates that may be timed, each held against fp64; a wrong one is an error."""
    kept = []
    with progress(len(candidates), f"checking length {candidates[0].setting.length}") as bar:
        for candidate in candidates:
            bar.update()
            if isinstance(candidate, Flex) and not _compiles(run, candidate):
                continue
            if getattr(candidate, "backend", "") != "reference":
                _check(run, candidate, modes)
            kept.append(candidate)
    return kept


def _check(run: AttentionRun, candidate: Candidate, modes: list[str]) -> None:
    by_flex = isinstance(candidate, Flex)
    error = check(candidate, bool({"train", "memory"} & set(modes)))
    if "decode" in modes and not by_flex:
        error = max(error, check_step(candidate))
    if by_flex and error > MOST:
        run.note(f"{candidate.label}: errs {error:.0f} times what the formula errs")
    else:
        run.worst = max(run.worst, (error, candidate.label))
    run.checked += not isinstance(candidate, NoPositions)


def _compiles(run: AttentionRun, candidate: Flex) -> bool:
    """Tell whether FlexAttention can express the scheme and be compiled here."""
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
    """Return what evaluates a scheme's rows, `auto` resolved; of others, nothing."""
    scheme = getattr(candidate, "attention", candidate)  # of a layer
    ours = isinstance(scheme, SchemeCandidate) and not isinstance(scheme, Flex)
    return scheme.chosen if ours else ""


def _serves(run: AttentionRun, candidate: Candidate, mode: str) -> bool:
    reason = candidate.refusal(mode)
    if mode == "decode" and candidate.label.endswith("naive"):
        return False  # a step's formula is what the cache saves
    if reason is not None:
        run.note(f"{candidate.label.split(', ')[-1]}, {mode}: {reason}")
    return reason is None


def _fits(run: AttentionRun, candidate: Candidate, mode: str) -> bool:
    """Tell whether a GPU's memory holds the candidate; a CPU's is not tried out."""
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


def _times(run: AttentionRun, candidates: list[Candidate], mode: str) -> list[dict]:
    args, setting = run.args, candidates[0].setting
    runs = {candidate.label: runner(candidate, mode) for candidate in candidates}
    column = f"{mode} {setting.length}"
    return timed_rows(column, BASELINE, runs, setting.device, args.rounds, args.seconds)


def _memory(candidates: list[Candidate]) -> list[dict]:
    """Return a row each: the peaks of training and of a forward pass, beyond the inputs."""
    rows, setting = [], candidates[0].setting
    with progress(len(candidates), f"memory {setting.length}") as bar:
        for candidate in candidates:
            train, forward = (peak_mebibytes(runner(candidate, mode), setting.device) for mode in ("train", "forward"))
            scheme = getattr(candidate, "attention", candidate)
            tables = scheme.table_mebibytes() if isinstance(scheme, SchemeCandidate) else 0.0
            sizes = {"MiB": train, "forward_MiB": forward, "tables_MiB": tables}
            rounded = {key: round(value, 2) for key, value in sizes.items()}
            rows.append({"name": candidate.label, **rounded})
            bar.update()
    for row in rows:
        if rows[0]["MiB"] > 0:
            row["ratio"] = round(row["MiB"] / rows[0]["MiB"], 4)
    return rows
