"""Write the report of a comparison: Markdown, CSV, and one HTML page without JavaScript or other files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.progress import counted, csv_cell, markdown_text
from relpos_fairseq.io.progress import table as markdown_table
from relpos_fairseq.lab.comparison.choices import CHOICE_HEADERS
from relpos_fairseq.lab.comparison.summary import Difference, Points, Summary, Table, TaskSummary, summarise

if TYPE_CHECKING:
    from relpos_fairseq.lab.comparison.scheduling import Comparison
    from relpos_fairseq.lab.comparison.statistics import Estimate

SCORE_HEADERS = (
    "scheme",
    "seeds",
    "mean [95 %]",
    "a further seed",
    "difference [95 %]",
    "p",
    "Holm",
    "detectable",
    "within",
)
DIFFERENCE = SCORE_HEADERS.index("difference [95 %]")  # bold where it survives Holm's correction
COST_HEADERS = ("scheme", "parameters", "processor seconds", "tokens/s", "MB")
READING = (
    "Intervals: hierarchical bootstrap over seeds and examples. A further seed: where the score of a seed that was not "
    "run lies, by Student's t. p: exact sign-flip permutation of the seeds' differences, Holm: corrected within the "
    "table; **bold** is what survives at 5 %. Detectable: the difference that this test of so many seeds would find "
    "with a power of 80 %; nothing, where no difference makes its p survive. Within: in how many seeds the examples "
    "alone tell the difference, above (+) and below (-) 0, by a paired bootstrap: it says nothing of other seeds."
)
CHOSEN = (
    "Each scheme has the learning rate and number of epochs whose median run is best on the data of validation; its "
    "scores above are of these runs, and no interval or test knows that they were chosen."
)
COLUMNS = (
    *("task", "set", "metric", "scheme", "seeds", "mean", "low", "high", "seed_low", "seed_high"),
    *("other", "difference", "difference_low", "difference_high", "p", "p_holm", "detectable"),
    *("seeds_above", "seeds_below", "parameters", "processor_seconds", "megabytes"),
)
Rows = list[tuple[list[str], bool]]  # cells, and whether the difference is significant


def write_report(comparison: Comparison) -> int:
    """Write report.md, report.csv and report.html beside the results; there must be some.

    Results that are still files of their own move into the archive.
    """
    if not (results := comparison.ended()):
        code = "" if comparison.any_code else " and this code (--any-code counts those of other versions)"
        raise UserError(f"{comparison.results} has no result of this comparison{code}: first `relpos compare run`")
    comparison.store.fold()
    summary = summarise(comparison.spec, results, len(comparison.runs))
    shown = contents(summary)
    texts = {"md": rendered("md", shown), "csv": csv_text(summary), "html": rendered("html", shown)}
    for ending, text in texts.items():
        write_text(comparison.results / f"report.{ending}", text, renews=True)
    print(texts["md"])
    print(f"written: {comparison.results}/report.md, .csv, .html")
    return 0


def contents(summary: Summary) -> dict[str, object]:
    """Return what the templates of the report show, by the names that they use."""
    parts, common = [], warnings_of(summary)
    for part in summary.tasks:
        metric, names = part.tables[0].metric.name, list(part.costs)
        charts = [
            chart(part.lengths, names, f"{metric} by length", part.unit, metric),
            chart(part.curves, names, "Validation loss during training", "updates", "bits a token"),
        ]
        scores = [
            {
                "caption": caption(table),
                "rows": score_rows(table, summary.spec.baseline),
                "warnings": [one for one in table.warnings() if one not in common],
            }
            for table in part.tables
        ]
        costs = [(row, False) for row in cost_rows(part)]
        extras = [(extra.title, extra.headers, [(row, False) for row in extra.rows]) for extra in part.extras]
        parts.append({"label": part.label, "scores": scores, "charts": charts, "extras": extras, "costs": costs})
    return {
        "summary": summary,
        "shown": shown_by(summary),
        "reading": READING,
        "warnings": common,
        "parts": parts,
        "score_headers": SCORE_HEADERS,
        "bold": DIFFERENCE,
        "cost_headers": COST_HEADERS,
        "chosen": CHOSEN,
        "choice_headers": CHOICE_HEADERS,
        "choices": choice_rows(summary),
        "made": [(row, False) for row in made_rows(summary)],
    }


def rendered(ending: str, shown: dict[str, object]) -> str:
    """Return what `contents` returned as Markdown (`md`), or as one page (`html`)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"text": markdown_text, "code": code, "table": markdown_rows}
    return environment.get_template(f"report.{ending}.jinja").render(shown)


def markdown_rows(rows: Rows, headers: Sequence[str], labels: int = 1) -> str:
    """Return a table as Markdown; its first columns are `labels`, others' text, and a sure difference is bold."""
    shown = []
    for cells, sure in rows:
        written = [*map(markdown_text, cells[:labels]), *cells[labels:]]
        if sure:
            written[DIFFERENCE] = f"**{written[DIFFERENCE]}**"
        shown.append(written)
    return markdown_table(shown, headers, written=True)


def code(name: str) -> str:
    """Return a name as Markdown's code, in one line."""
    return f"`{' '.join(name.split()).replace('`', chr(39))}`"


def csv_text(summary: Summary) -> str:
    """Return the report as CSV: a line for every scheme, and for every difference, of every table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()

    def write(place: dict[str, str], **more: object) -> None:
        writer.writerow({column: csv_cell(value) for column, value in (place | more).items()})

    for part in summary.tasks:
        for table in part.tables:
            place = {"task": part.label, "set": table.set, "metric": table.metric.name}
            for scheme, row in table.rows.items():
                cost, numbers = part.costs[scheme], rounded(row.estimate, "mean", "low", "high")
                if len(row.seeds) > 1:
                    numbers |= {"seed_low": f"{row.further.low:.6g}", "seed_high": f"{row.further.high:.6g}"}
                numbers |= {"parameters": cost.parameters, "processor_seconds": known(cost.seconds, ".1f")}
                numbers |= {"megabytes": known(cost.megabytes, ".0f")}
                write(place, scheme=scheme, seeds=len(row.seeds), **numbers)
            for one in table.differences:
                numbers = rounded(one.estimate, "difference", "difference_low", "difference_high")
                numbers |= {"p": f"{one.p:.6g}", "p_holm": f"{one.holm:.6g}", "detectable": f"{one.detectable:.6g}"}
                numbers |= {"other": one.other, "seeds_above": one.above, "seeds_below": one.below}
                write(place, scheme=one.scheme, seeds=one.seeds, **numbers)
    return text.getvalue()


def known(value: float | None, form: str) -> str:
    """Return a cost, or "" where it is not known: a training that was killed has not said it."""
    return "" if value is None else format(value, form)


def rounded(value: Estimate, *names: str) -> dict[str, str]:
    """Return a mean, and the ends of its interval, to six figures under the names of three columns."""
    return dict(zip(names, (f"{one:.6g}" for one in (value.mean, value.low, value.high)), strict=True))


def shown_by(summary: Summary) -> list[str]:
    """Return the answer in lines: of each table the differences that survive the test, then where there are none."""
    lines, none = [], []
    for part in summary.tasks:
        for table in (table for table in part.tables if table.differences):
            name, told = f"{part.label}, {table.metric.name} on {table.set}", {}
            for one in (one for one in table.differences if one.sure):
                cell = difference_cells(one, table.metric.digits)[0]
                told.setdefault(one.other, []).append(f"{one.scheme} {cell}")
            lines += [f"{name}, to {other}: {'; '.join(cells)}" for other, cells in told.items()]
            none += [] if told else [name]
    where = "; ".join(none) if lines else f"in none of {counted(len(none), 'table')}"
    return lines + [f"No difference survives the test: {where}"] * bool(none)


def warnings_of(summary: Summary) -> list[str]:
    """Return what a reader must know of the whole comparison, what holds for all of its tables among it."""
    found = []
    if summary.done < summary.total:
        found.append(f"Not finished: {summary.done} of {counted(summary.total, 'run')}")
    if len(summary.codes) > 1:
        found.append(f"Results of {len(summary.codes)} versions of the code are mixed")
    if len(summary.processors) > 1:
        found.append(f"Results of {len(summary.processors)} processors are mixed")
    tables = [table.warnings() for part in summary.tasks for table in part.tables if table.differences]
    return found + [one for one in (tables[0] if tables else ()) if all(one in warnings for warnings in tables)]


def caption(table: Table) -> str:
    """Return the metric and the test set of a table, as Markdown."""
    better = "higher" if table.metric.higher else "lower"
    examples = counted(table.examples, "example")
    if table.distinct < table.examples:
        examples += f" of {table.distinct} distinct inputs"
    return f"{table.metric.name} on {code(table.set)} ({examples}; {better} is better)"


def score_rows(table: Table, baseline: str) -> Rows:
    """Return each scheme's score and its difference to the baseline, then each tested pair without the baseline."""
    digits, rows = table.metric.digits, []
    to_baseline = {one.scheme: one for one in table.differences if one.other == baseline}
    for scheme, row in table.rows.items():
        one = to_baseline.get(scheme)
        mean = format_number(row.estimate.mean, digits) + format_interval(row.estimate, digits)
        further = format_interval(row.further, digits).strip() if len(row.seeds) > 1 else ""
        rows.append(
            ([scheme, str(len(row.seeds)), mean, further, *difference_cells(one, digits)], one is not None and one.sure)
        )
    for one in table.differences:
        if one.other != baseline:
            name = f"{one.scheme} - {one.other}"
            rows.append(([name, str(one.seeds), "", "", *difference_cells(one, digits)], one.sure))
    return rows


def difference_cells(one: Difference | None, digits: int) -> list[str]:
    """Return the cells of a difference, from `difference [95 %]` to `within`; empty ones for None."""
    if one is None:
        return [""] * 5
    sign = "+" if one.estimate.mean >= 0 else ""
    return [
        sign + format_number(one.estimate.mean, digits) + format_interval(one.estimate, digits),
        f"{one.p:.3f}",
        f"{one.holm:.3f}",
        format_number(one.detectable, digits) if np.isfinite(one.detectable) else "nothing",
        f"+{one.above} -{one.below}",
    ]


def format_number(value: float, digits: int) -> str:
    """Return a number with so many decimals; a very large one with three figures."""
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"


def format_interval(value: Estimate, digits: int) -> str:
    """Return the ends of an interval in brackets."""
    return f" [{format_number(value.low, digits)}, {format_number(value.high, digits)}]"


def cost_rows(part: TaskSummary) -> list[list[str]]:
    """Return each scheme's parameters, time, speed and memory."""
    return [
        [name, f"{c.parameters:,}", *(known(one, ",.0f") or "unknown" for one in (c.seconds, c.speed, c.megabytes))]
        for name, c in part.costs.items()
    ]


def choice_rows(summary: Summary) -> Rows:
    """Return what was chosen of each grid for each scheme."""
    return [([*key, *one.row()], False) for key, one in summary.choices.items()]


def made_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return how the comparison was made, as (what, value)."""
    rows = [
        ("runs", f"{summary.done} of {summary.total} done"),
        ("seeds", ", ".join(map(str, summary.spec.seeds))),
        ("hours of training and scoring", f"{summary.seconds / 3600:.2f}"),
        ("processor hours of training", f"{summary.processor_seconds / 3600:.2f}"),
        ("processors", "; ".join(f"{name}: {counted(n, 'run')}" for name, n in summary.processors.items())),
        ("code", ", ".join(summary.codes)),
        ("versions", ", ".join(f"{name} {v}" for name, v in summary.versions.items())),
    ]
    for part in summary.tasks:
        flags = ", ".join(f"{name} {value}" for name, value in part.settings.items() if name != "kind")
        rows.append((f"{part.label} ({part.kind})", f"data {part.data[:12]}; {flags}"))
    return rows


def chart(series: dict[str, Points], names: list[str], title: str, x: str, y: str) -> tuple[str, str]:
    """Return a title, and a curve for each name as SVG; of names without a point, "" in its place."""
    from relpos_fairseq.plots.axes import Panel, Picture, svg_text

    places = sorted({place for line in series.values() for place, _ in line})
    if not places:
        return title, ""
    points = {name: dict(line) for name, line in series.items()}
    values = np.array([[points.get(name, {}).get(place, np.nan) for place in places] for name in names])
    panels = [Panel({}, names, places, values)]
    return title, svg_text(Picture("", title, "mean over seeds", "lines", panels, "", "", (x, "", y), neutral=None))
