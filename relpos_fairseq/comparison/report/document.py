"""The report as Markdown, and the texts that the page shares with it."""

from __future__ import annotations

from relpos_fairseq.comparison import statistics
from relpos_fairseq.comparison.report.summary import Difference, Part, Summary, Table
from relpos_fairseq.engine.tables import counted
from relpos_fairseq.engine.tables import table as markdown_table

HEADERS = ("scheme", "seeds", "mean [95 %]", "difference [95 %]", "p", "Holm", "detectable", "within")
COSTS = ("scheme", "parameters", "processor seconds", "tokens/s", "MB")
READING = (
    "Intervals: hierarchical bootstrap over seeds and examples. p: exact sign-flip permutation of "
    "the seeds' differences, Holm: corrected within the table; **bold** is what survives at 5 %. "
    "Detectable: the difference that so many seeds would find with a power of 80 %. Within: in how "
    "many seeds the examples alone tell the difference, above (+) and below (-) 0, by a paired "
    "bootstrap: it says nothing of other seeds."
)


def number(value: float, digits: int) -> str:
    """Return a number for the eye; a very large one with three figures."""
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"


def signed(value: float, digits: int) -> str:
    return f"+{number(value, digits)}" if value >= 0 else number(value, digits)


def rows_of(table: Table, baseline: str) -> list[tuple[list[str], bool]]:
    """Return each scheme's line, with the difference to the baseline, and whether that is sure."""
    digits, found = table.metric.digits, []
    to_baseline = {one.scheme: one for one in table.differences if one.other == baseline}
    for scheme, row in table.rows.items():
        value, one = row.estimate, to_baseline.get(scheme)
        cells = [scheme, str(len(row.seeds)), number(value.mean, digits) + span(value, digits)]
        found.append((cells + difference_cells(one, digits), one is not None and one.sure))
    return found


def span(value: statistics.Estimate, digits: int) -> str:
    return f" [{number(value.low, digits)}, {number(value.high, digits)}]"


def difference_cells(one: Difference | None, digits: int) -> list[str]:
    """Return the cells of a difference."""
    if one is None:
        return [""] * 5
    return [
        signed(one.estimate.mean, digits) + span(one.estimate, digits),
        f"{one.p:.3f}",
        f"{one.holm:.3f}",
        number(one.detectable, digits),
        f"+{one.above} -{one.below}",
    ]


def others_of(table: Table, baseline: str) -> list[tuple[list[str], bool]]:
    """Return a line for each tested pair without the baseline."""
    return [
        ([f"{one.scheme} - {one.other}", str(one.seeds), "", *difference_cells(one, table.metric.digits)], one.sure)
        for one in table.differences
        if one.other != baseline
    ]


def caption(table: Table) -> str:
    """Return what a table shows."""
    better = "higher" if table.metric.higher else "lower"
    examples = counted(table.examples, "example")
    return f"{table.metric.name} on `{table.set}` ({examples}; {better} is better)"


def costs_of(part: Part) -> list[list[str]]:
    """Return a line of costs for each scheme."""
    return [
        [name, f"{c.parameters:,}", f"{c.seconds:.0f}", f"{c.speed:,.0f}", f"{c.megabytes:,.0f}"]
        for name, c in part.costs.items()
    ]


def made_of(summary: Summary) -> list[tuple[str, str]]:
    """Return how the comparison was made, as (what, value)."""
    rows = [
        ("cells", f"{summary.done} of {summary.total} done"),
        ("seeds", ", ".join(map(str, summary.seeds))),
        ("hours of training and scoring", f"{summary.seconds / 3600:.2f}"),
        ("code", ", ".join(summary.codes)),
        ("versions", ", ".join(f"{name} {v}" for name, v in summary.versions.items())),
    ]
    for part in summary.tasks:
        flags = ", ".join(f"{name} {value}" for name, value in part.settings.items() if name != "kind")
        rows.append((f"{part.label} ({part.kind})", f"data {part.data[:12]}; {flags}"))
    return rows


def markdown(summary: Summary) -> str:
    """Return the whole report."""
    lines = [f"# {summary.title}", "", READING, ""]
    if summary.done < summary.total:
        lines += [f"**Not finished: {summary.done} of {counted(summary.total, 'cell')}.**", ""]
    if len(summary.codes) > 1:
        lines += [f"**Results of {len(summary.codes)} versions of the code are mixed.**", ""]
    for part in summary.tasks:
        lines += [f"## {part.label}", ""]
        for table in part.tables:
            lines += [f"{caption(table)}. Differences: to `{summary.baseline}`.", ""]
            rows = rows_of(table, summary.baseline) + others_of(table, summary.baseline)
            shown = [[*c[:3], f"**{c[3]}**" if sure else c[3], *c[4:]] for c, sure in rows]
            lines += [markdown_table(shown, HEADERS, written=True), ""]
            lines += [f"Warning: {warning}.\n" for warning in table.warnings()]
        lines += ["Cost, in the median over seeds:", "", markdown_table(costs_of(part), COSTS, written=True), ""]
    lines += ["## How it was made", "", markdown_table(made_of(summary), ("what", "value")), ""]
    return "\n".join(lines)
