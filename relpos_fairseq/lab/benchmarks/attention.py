"""Measure attention with positions beside attention without, after checking every candidate against fp64.

A candidate is checked twice: all of a small call of odd length and, at the shape that is timed, some rows of the output
with all gradients that flow from them (the formula then needs those rows only, so that 16384 tokens can be checked).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from relpos_fairseq.attention import BACKENDS, attend
from relpos_fairseq.attention.error_budget import BUDGETS, error_budget, sizes
from relpos_fairseq.io.progress import progress
from relpos_fairseq.lab.benchmarks.candidates import (
    BASELINE,
    MODES,
    Candidate,
    Flex,
    LayerCandidate,
    NoPositions,
    SchemeCandidate,
    runner,
)
from relpos_fairseq.lab.benchmarks.measurement import (
    HOW,
    RowLog,
    check_plot,
    draw_lengths,
    machine,
    peak_mebibytes,
    table,
    time_cell,
    timed_rows,
    write_section,
)
from relpos_fairseq.lab.benchmarks.workload import (
    EVERY_LENGTH,
    AttentionSetting,
    Options,
    chosen_of,
    clip_text,
    draw,
    draw_heads,
    has_formula,
    instruction_sets_in_use,
    lengths_of,
    prepare_run,
    scheme_and_backend,
    schemes_of,
    setting_of,
)
from relpos_fairseq.schemes import parse_hybrid, schemes_for

OURS = [name for name in BACKENDS if name != "reference"]  # which is --naive
FORMULA = {"cpu": 1 << 27, "cuda": 1 << 31}  # elements of the formula's largest tensor, at most


@dataclass
class AttentionRun:
    """What a command measures, and what it has found."""

    args: Options  # the command line
    where: dict  # columns for machine and versions
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


def benchmark(args: Options) -> None:
    """Check candidates, time them, print the tables, and write them where asked."""
    device = check_arguments(args)
    torch.manual_seed(1)
    words = machine(device, args.threads)
    where = {"machine": words.split(";")[0].replace(",", ""), "torch": torch.__version__}
    if device.type == "cpu":
        where["instructions"] = instruction_sets_in_use()
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


def check_arguments(args: Options) -> torch.device:
    """Turn texts into lists, refuse impossible values, and return the device."""
    every = args.lengths == "all"
    args.lengths = list(EVERY_LENGTH) if every else lengths_of(args.lengths, ", or all")
    args.modes = chosen_of("modes", args.modes, MODES)
    args.backends = chosen_of("backends", args.backends, OURS)
    args.schemes = schemes_of(args.schemes, schemes_for(args.causal, attention=True))
    args.position_clip_distance = 0 if args.unclipped else args.position_clip_distance
    if args.max_tokens is None:
        args.max_tokens = 2048 if args.device == "cpu" else 16384
    if args.layer and "decode" in args.modes:
        raise ValueError("--layer does not decode: leave decode out of --modes")
    check_plot(args.plot)
    return prepare_run(args)


def settings_of(args: Options) -> list[AttentionSetting]:
    """Return one setting a length, shortest first."""
    batches = {n: args.batch_size or max(args.max_tokens // n, 1) for n in sorted(set(args.lengths))}
    clip = args.position_clip_distance
    return [setting_of(AttentionSetting, args, length=n, batch=batch, clip=clip) for n, batch in batches.items()]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring.


def measure(run: AttentionRun, setting: AttentionSetting) -> None:
    """Check and time all candidates of a length, column by column."""
    waiting = list(run.args.modes)
    if run.log.rows:  # a scheme that FlexAttention cannot express has no row in a complete file either
        labels = [c.label for c in candidates_of(run, setting) if not isinstance(c, Flex)]
        waiting = [mode for mode in waiting if run.log.lacks(run.column(setting, mode), labels)]
    if not waiting:
        return
    candidates = checked(run, candidates_of(run, setting), waiting)
    for mode in waiting:
        served = [LayerCandidate(each) if run.args.layer else each for each in candidates]
        served = [each for each in served if _serves(run, each, mode) and _fits(run, each, mode)]
        rows = _memory(served) if mode == "memory" else _times(run, served, mode)
        if mode != "decode":  # whose steps are evaluated by code of their own
            used = {candidate.label: _backend(candidate) for candidate in served}
            rows = [{**row, "backend": used[row["name"]]} for row in rows]
        run.log.replace(run.column(setting, mode), rows)


def candidates_of(run: AttentionRun, setting: AttentionSetting) -> list[Candidate]:
    """Return the baseline, then each scheme by this package's backends, by FlexAttention and by the formula."""
    found: list[Candidate] = [NoPositions(BASELINE, setting)]
    for name in run.args.schemes:
        found += [SchemeCandidate(name, setting, backend) for backend in run.args.backends]
        if run.args.flex and not run.args.layer:
            found.append(Flex(name, setting))
        if run.args.naive and has_formula(name):
            if (
                setting.batch * setting.heads * setting.length**2 * _width(name, setting)
                <= FORMULA[setting.device.type]
            ):
                found.append(SchemeCandidate(name, setting, "reference"))
            else:
                run.note(f"{name}, naive: not at {setting.length}, for memory")
    return found


def _width(name: str, setting: AttentionSetting) -> int:
    """Return how many numbers the formula's largest tensor has for each pair of a query and a key."""
    return setting.head_dim if any(member.replaces_qk for member in parse_hybrid(name)) else 1


def _backend(candidate: Candidate) -> str:
    """Return the backend of a scheme's rows, `auto` resolved; "" of other candidates."""
    scheme = getattr(candidate, "attention", candidate)  # of a layer
    ours = isinstance(scheme, SchemeCandidate) and not isinstance(scheme, Flex)
    return scheme.chosen if ours else ""


def _serves(run: AttentionRun, candidate: Candidate, mode: str) -> bool:
    """Return whether a mode can be measured; note why not."""
    reason = candidate.refusal(mode)
    if mode == "decode" and candidate.label.endswith("naive"):
        return False  # a step's formula is what the cache saves
    if reason is not None:
        run.note(f"{candidate.label.split(', ')[-1]}, {mode}: {reason}")
    return reason is None


def _fits(run: AttentionRun, candidate: Candidate, mode: str) -> bool:
    """Return whether a GPU's memory holds the candidate; a CPU's is not tried out."""
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
    runs = {candidate.label: runner(candidate, mode) for candidate in candidates}
    column = f"{mode} {candidates[0].setting.length}"
    return timed_rows(column, BASELINE, runs, run.args.rounds, run.args.seconds)


def _memory(candidates: list[Candidate]) -> list[dict]:
    """Return a row each: the peaks of training and of a forward pass, beyond the inputs."""
    rows, setting = [], candidates[0].setting
    for candidate in progress(candidates, description=f"memory {setting.length}"):
        train, forward = (peak_mebibytes(runner(candidate, mode), setting.device) for mode in ("train", "forward"))
        scheme = getattr(candidate, "attention", candidate)
        tables = scheme.table_mebibytes() if isinstance(scheme, SchemeCandidate) else 0.0
        sizes = {"MiB": train, "forward_MiB": forward, "tables_MiB": tables}
        rows.append({"name": candidate.label, **{key: round(value, 2) for key, value in sizes.items()}})
    for row in rows:
        if rows[0]["MiB"] > 0:
            row["ratio"] = round(row["MiB"] / rows[0]["MiB"], 4)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Checking against fp64.

ODD_LENGTH = 130
MOST = BUDGETS["timed"]["worst"][0]  # errors, in units of what the formula in the same precision errs
FEW = 64  # numbers whose largest error is a draw of chance: they may err as much as other results
OTHERS_MOST = 100.0  # of FlexAttention, whose captured tensors are rounded to half precision
ELEMENTS = 1 << 26  # of the formula's largest tensor
ROWS = 16

RowRanges = Sequence[tuple[int, int]]


def checked(run: AttentionRun, candidates: list[Candidate], modes: list[str]) -> list[Candidate]:
    """Return the candidates that may be timed, each compared with fp64; a wrong one is an error."""
    kept = []
    for candidate in progress(candidates, description=f"checking length {candidates[0].setting.length}"):
        if isinstance(candidate, Flex) and not _compiles(run, candidate):
            continue
        if isinstance(candidate, SchemeCandidate) and candidate.backend != "reference":
            _check(run, candidate, modes)
        kept.append(candidate)
    return kept


def _check(run: AttentionRun, candidate: SchemeCandidate, modes: list[str]) -> None:
    by_flex = isinstance(candidate, Flex)
    error = check(candidate, bool({"train", "memory"} & set(modes)))
    if "decode" in modes and not by_flex:
        error = max(error, check_step(candidate))
    if by_flex and error > MOST:
        run.note(f"{candidate.label}: errs {error:.0f} times what the formula errs")
    else:
        run.worst = max(run.worst, (error, candidate.label))
    run.checked += 1


def _compiles(run: AttentionRun, candidate: Flex) -> bool:
    """Return whether FlexAttention can express the scheme and be compiled here; note why not."""
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


def check(candidate: SchemeCandidate, gradients: bool = True) -> float:
    """Compare a candidate with fp64: values, and gradients where it has them.

    Returns:
        Its largest error, in units of what the formula errs in the same precision (with rounding).

    Raises:
        ValueError: it errs more than MOST, FlexAttention more than OTHERS_MOST.
    """
    setting = candidate.setting
    small = replace(setting, batch=2, heads=min(setting.heads, 3), length=ODD_LENGTH)
    worst = _error(candidate, some_rows(candidate.name, setting), gradients)
    if isinstance(candidate, Flex):  # whose every shape is compiled
        return worst
    whole = _error(SchemeCandidate(candidate.name, small), [(0, ODD_LENGTH)], gradients)
    return max(worst, whole)


def check_step(candidate: SchemeCandidate) -> float:
    """Compare a step of decoding with fp64, values alone; returns and raises as `check`."""
    setting = replace(candidate.setting, causal=True)
    q, k, v = draw_heads(setting, queries=1)
    last = [(setting.length - 1, setting.length)]
    whole = q.expand(-1, -1, setting.length, -1)
    truth, eager = (
        _formula(candidate.name, setting, dtype, (whole, k, v), last, gradients=False)
        for dtype in (torch.float64, setting.dtype)
    )
    with torch.no_grad():
        found = [candidate.decoder(q, k, v)()]
    return _compared(candidate.label, truth, eager, found, setting)


def some_rows(name: str, setting: AttentionSetting) -> RowRanges:
    """Return the ranges of rows that are checked: the first, some in the middle, and the last."""
    pairs = setting.batch * setting.heads * setting.length * _width(name, setting)
    count = max(1, min(ROWS, ELEMENTS // pairs))
    if 3 * count >= setting.length:
        return [(0, setting.length)]
    middle, last = setting.length // 2 + 3, setting.length
    middle = min(middle, last - 2 * count)
    return [(0, count), (middle, middle + count), (last - count, last)]


def _error(candidate: SchemeCandidate, rows: RowRanges, gradients: bool) -> float:
    setting = candidate.setting
    given = draw_heads(setting)
    gradients = gradients and candidate.refusal("train") is None
    truth, eager = (
        _formula(candidate.name, setting, dtype, given, rows, gradients) for dtype in (torch.float64, setting.dtype)
    )

    def outputs(leaves: list[Tensor]) -> list[Tensor]:
        out = candidate(*leaves)
        return [out[:, :, start:stop] for start, stop in rows]

    found = _results(candidate, given, outputs, gradients)
    most = OTHERS_MOST if isinstance(candidate, Flex) else MOST
    return _compared(candidate.label, truth, eager, found, setting, most)


def _formula(
    name: str,
    setting: AttentionSetting,
    dtype: torch.dtype,
    given: tuple[Tensor, ...],
    rows: RowRanges,
    gradients: bool,
) -> list[Tensor]:
    """Return rows and gradients by the formula, in a precision."""
    scheme = SchemeCandidate(name, setting, "reference", dtype)

    def outputs(leaves: list[Tensor]) -> list[Tensor]:
        inputs = scheme.call(*leaves)
        return [attend(inputs.rows(*pair), "reference")[0] for pair in rows]

    return _results(scheme, [part.to(dtype) for part in given], outputs, gradients)


def _results(
    candidate: Candidate, given: Sequence[Tensor], outputs: Callable[[list[Tensor]], list[Tensor]], gradients: bool
) -> list[Tensor]:
    """Return rows of the output, then gradients of the inputs and parameters where asked."""
    with torch.set_grad_enabled(gradients):
        leaves = [part.detach().requires_grad_(gradients) for part in given]
        found = outputs(leaves)
    if not gradients:
        return found
    setting = candidate.setting
    upstream = [draw(setting, *part.shape, seed=99).to(part.dtype) for part in found]
    wanted = [*leaves, *candidate.parameters()]
    back = torch.autograd.grad(found, wanted, upstream, allow_unused=True)
    filled = (torch.zeros_like(leaf) if part is None else part for part, leaf in zip(back, wanted, strict=True))
    return [part.detach() for part in (*found, *filled)]


def _compared(
    label: str,
    truth: list[Tensor],
    eager: list[Tensor],
    found: list[Tensor],
    setting: AttentionSetting,
    most: float = MOST,
) -> float:
    """Return the largest error of `found`, in units of eager's own with rounding; above `most` it is refused."""
    epsilon = torch.finfo(setting.dtype).eps
    found, eager, exact = (dict(enumerate(part)) for part in (found, eager, truth))
    errors = {number: sizes(eager[number].double() - right)["worst"] for number, right in exact.items()}
    usual = max(errors[number] / (sizes(right)["worst"] + 1e-30) for number, right in exact.items())
    usual = min(usual, 64 * epsilon)  # what is zero but for rounding errs by many times its size
    chance = {
        number: {"worst": MOST * usual * sizes(right)["worst"] if right.numel() < FEW else 0.0}
        for number, right in exact.items()
    }
    worst, place = 0.0, 0
    for number, one in enumerate(error_budget(found, eager, exact, "timed", epsilon, floor=chance)):
        if not MOST * one.share <= worst:  # NaN is no number that is smaller
            worst, place = MOST * one.share, number
    if not worst <= most:
        raise ValueError(
            f"{label} at length {setting.length}: result {place + 1} of {len(found)} (rows of the "
            f"output, then gradients of q, k, v, parameters) errs {worst:.1f} times what the "
            f"formula errs in the same precision, compared with fp64; it is not timed"
        )
    return worst


# ---------------------------------------------------------------------------------------------------------------------
# The report.

TITLES = {
    "train": "Forward and backward pass",
    "forward": "Forward pass",
    "decode": "One step of decoding",
    "memory": "Peak memory of training; of a forward pass",
}


def report(args: Options, rows: list[dict], notes: list[str], machine: str) -> str:
    """Return what was measured, the tables of all settings and modes, and remarks for the foot."""
    what = "a BERT layer" if args.layer else "attention"
    parts = [
        f"{machine}; {what}, {size_of(args)}, {args.heads} heads of {args.head_dim}, {args.dtype}, "
        f"{clip_text(args)}, {'causal' if args.causal else 'both directions'}. "
        f"{HOW.format('the first row')}{backends_used(rows)}",
        tables(rows),
    ]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def size_of(args: Options) -> str:
    """Return how large a batch is, in words."""
    return f"batch {args.batch_size}" if args.batch_size else f"{args.max_tokens} tokens a batch"


def key_of(args: Options) -> str:
    """Return the name of a command's section in a markdown file."""
    parts = [args.device, args.dtype, "causal" if args.causal else "both directions", clip_text(args)]
    parts += ["layer" if args.layer else "", "FlexAttention" if args.flex else ""]
    parts.append(args.isa or "")
    parts.append("by " + " ".join(args.backends) if args.backends != ["auto"] else "")
    if set(args.modes) & {"decode", "memory"}:
        parts.append(" ".join(args.modes))
    parts.append(f"lengths {','.join(str(length) for length in sorted(set(args.lengths)))}")
    parts.append(size_of(args))
    return " ".join(part for part in parts if part)


def tables(rows: list[dict]) -> str:
    """Return a table for each mode: a row for each candidate, a column for each length."""
    cells = {(row["name"], row["length"], row["mode"]): row for row in rows}
    names, modes = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "mode"))
    lengths = sorted({row["length"] for row in rows})
    texts = []
    for mode in [mode for mode in TITLES if mode in modes]:
        lines = []
        for name in sorted(names, key=lambda name: _order(name, names)):
            found = [cells.get((name, length, mode)) for length in lengths]
            if any(found):
                lines.append([name, *map(_cell, found)])
        texts.append(table([TITLES[mode], *(f"{length:,}" for length in lengths)], lines))
    return "\n\n".join(texts)


def _order(name: str, names: list[str]) -> tuple[int, str]:
    """Return a sorting key: schemes as they came, each followed by its other candidates."""
    scheme = name.split(",")[0]
    return names.index(scheme) if scheme in names else len(names), name


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    if row["mode"] != "memory":
        return time_cell(row, BASELINE, digits=2)
    if "MiB" not in row or row["MiB"] != row["MiB"]:
        return "-"
    text = f"{_short(row['MiB'])}; {_short(row['forward_MiB'])} MiB"
    if row["name"] != BASELINE and "ratio" in row:
        text += f" ({row['ratio']:.2f})"
    return text


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def backends_used(rows: list[dict]) -> str:
    """Return which backends `auto` took, in words: first the one that most rows have."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.get("backend") and scheme_and_backend(row["name"])[1] == "auto":
            lengths = found.setdefault(row["backend"], {}).setdefault(row["name"], [])
            lengths += [row["length"]] * (row["length"] not in lengths)
    by_size = sorted(found, key=lambda name: -sum(map(len, found[name].values())))
    words = []
    for number, backend in enumerate(by_size):
        names: dict[str, list[str]] = {}
        for name, lengths in found[backend].items():
            names.setdefault(", ".join(map(str, sorted(lengths))), []).append(name)
        where = "; ".join(f"{', '.join(these)} at {lengths}" for lengths, these in names.items())
        words.append(f"`{backend}`" if number == 0 else f"`{backend}` ({where})")
    return f" Evaluated by {', '.join(words)}." if words else ""
