"""Write the report of a comparison: Markdown, CSV and one HTML page."""

from __future__ import annotations

import csv
import io
from html import escape
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from relpos_fairseq.comparison import statistics
from relpos_fairseq.comparison.summary import Difference, Part, Summary, Table, summarise
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.progress import counted
from relpos_fairseq.io.progress import table as markdown_table

if TYPE_CHECKING:
    from relpos_fairseq.comparison.scheduling import Comparison


# ---- Lines as SVG.


Points = list[tuple[float, float]]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f", "#b2182b", "#6a3d9a")
DASHES = ("", "6 3", "2 3")  # each round of colours has its own
WIDTH, HEIGHT = 500, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 52
TICKS = 6


def svg_chart(series: dict[str, Points], colours: dict[str, str], x: str, y: str, title: str) -> str:
    """Return a chart of lines, by name.

    `x` and `y` say what the axes show; the title is for those who cannot see it.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        return f"<p>{escape(title)}: no points.</p>"
    (left, right, xs), (low, high, ys) = axis_ticks([p[0] for p in points]), axis_ticks([p[1] for p in points])

    def across(value: float) -> float:
        return LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    floor_y = HEIGHT - BOTTOM
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(v):.1f}" y2="{up(v):.1f}" '
        f'stroke="#8884"/><text x="{LEFT - 6}" y="{up(v) + 4:.1f}" text-anchor="end" '
        f'fill="currentColor">{v:g}</text>'
        for v in ys
    ]
    parts += [
        f'<text x="{across(v):.1f}" y="{floor_y + 20}" text-anchor="middle" fill="currentColor">{v:g}</text>'
        for v in xs
    ]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle" '
        f'fill="currentColor">{escape(x)}</text>'
    )
    parts.append(
        f'<text transform="translate(14 {(TOP + floor_y) / 2}) rotate(-90)" '
        f'text-anchor="middle" fill="currentColor">{escape(y)}</text>'
    )
    for number, (name, line) in enumerate(series.items()):
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in line)
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" '
            f'stroke-width="2" stroke-dasharray="{dash}"><title>{escape(name)}</title>'
            "</polyline>"
        )
        parts += [f'<circle cx="{across(a):.1f}" cy="{up(b):.1f}" r="2.5" fill="{colours[name]}"/>' for a, b in line]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">' + "".join(parts) + "</svg>"


def axis_ticks(values: list[float]) -> tuple[float, float, list[float]]:
    """Return an axis's ends and its ticks, at round numbers."""
    low, high = min(values), max(values)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    step = 10 ** floor(log10((high - low) / TICKS))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= TICKS)
    first, last = floor(low / step), ceil(high / step)
    return first * step, last * step, [round(n * step, 10) for n in range(first, last + 1)]


# ---- The report as Markdown, and the texts that the page shares with it.


HEADERS = ("scheme", "seeds", "mean [95 %]", "difference [95 %]", "p", "Holm", "detectable", "within")
COSTS = ("scheme", "parameters", "processor seconds", "tokens/s", "MB")
READING = (
    "Intervals: hierarchical bootstrap over seeds and examples. p: exact sign-flip permutation of "
    "the seeds' differences, Holm: corrected within the table; **bold** is what survives at 5 %. "
    "Detectable: the difference that so many seeds would find with a power of 80 %. Within: in how "
    "many seeds the examples alone tell the difference, above (+) and below (-) 0, by a paired "
    "bootstrap: it says nothing of other seeds."
)


def format_number(value: float, digits: int) -> str:
    """Return a number for the eye; a very large one with three figures."""
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"


def format_signed(value: float, digits: int) -> str:
    return f"+{format_number(value, digits)}" if value >= 0 else format_number(value, digits)


def rows_of(table: Table, baseline: str) -> list[tuple[list[str], bool]]:
    """Return each scheme's line, with the difference to the baseline, and whether that is sure."""
    digits, found = table.metric.digits, []
    to_baseline = {one.scheme: one for one in table.differences if one.other == baseline}
    for scheme, row in table.rows.items():
        value, one = row.estimate, to_baseline.get(scheme)
        cells = [scheme, str(len(row.seeds)), format_number(value.mean, digits) + format_interval(value, digits)]
        found.append((cells + difference_cells(one, digits), one is not None and one.sure))
    return found


def format_interval(value: statistics.Estimate, digits: int) -> str:
    return f" [{format_number(value.low, digits)}, {format_number(value.high, digits)}]"


def difference_cells(one: Difference | None, digits: int) -> list[str]:
    """Return the cells of a difference."""
    if one is None:
        return [""] * 5
    return [
        format_signed(one.estimate.mean, digits) + format_interval(one.estimate, digits),
        f"{one.p:.3f}",
        f"{one.holm:.3f}",
        format_number(one.detectable, digits),
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


# ---- The report as one HTML page: no JavaScript, no other file, readable on a phone.


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8886; padding-top: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
.made th, .made td { white-space: normal; text-align: left; overflow-wrap: anywhere; }
.made td:first-child { min-width: 6em; }
figure { margin: 1rem 0; }
svg { width: 100%; height: auto; display: block; font: 16px system-ui, sans-serif; }
figcaption, .legend { font-size: .9rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
.legend i { display: inline-block; width: 1.6em; height: .25em; margin-right: .4em; }
.legend i { vertical-align: middle; }
.warning { border-left: .3rem solid #c60; padding-left: .6rem; }
.pictures { display: grid; gap: 0 1.5rem; }
.pictures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
"""


def html_page(summary: Summary) -> str:
    """Return the page."""
    title = escape(summary.title)
    parts = [f"<h1>{title}</h1>", f"<p>{escape(READING).replace('**bold**', '<b>bold</b>')}</p>"]
    if summary.done < summary.total:
        parts.append(html_warning(f"Not finished: {summary.done} of {counted(summary.total, 'cell')}"))
    if len(summary.codes) > 1:
        parts.append(html_warning(f"Results of {len(summary.codes)} versions of the code are mixed"))
    parts += [html_section(part, summary.baseline) for part in summary.tasks]
    parts += ["<h2>How it was made</h2>", rows_html(("what", "value"), made_of(summary), "made")]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def html_warning(text: str) -> str:
    return f'<p class="warning">{escape(text)}.</p>'


def html_section(part: Part, baseline: str) -> str:
    metric = part.tables[0].metric.name
    colours = dict(zip(part.costs, (COLOURS * 3)[: len(part.costs)], strict=False))
    figures = [
        html_figure(f"{metric} by length, mean over seeds", part.lengths, colours, part.unit, metric),
        html_figure(
            "Validation loss during training, mean over seeds", part.curves, colours, "updates", "bits a token"
        ),
    ]
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return "\n".join(
        [
            f"<h2>{escape(part.label)}</h2>",
            *(html_scores(table, baseline) for table in part.tables),
            f'<div class="pictures">{"".join(figures)}</div><div class="legend">{legend}</div>',
            "<p>Cost, in the median over seeds:</p>",
            rows_html(COSTS, costs_of(part)),
        ]
    )


def html_scores(table: Table, baseline: str) -> str:
    """Return a table of scores."""
    rows = []
    for cells, sure in rows_of(table, baseline) + others_of(table, baseline):
        cells = [escape(cell) for cell in cells]
        rows.append([*cells[:3], f"<b>{cells[3]}</b>" if sure else cells[3], *cells[4:]])
    said = escape(caption(table)).replace("`", "")
    return "\n".join(
        [
            f"<p>{said}. Differences: to {escape(baseline)}.</p>",
            rows_html(HEADERS, rows, raw=True),
            *map(html_warning, table.warnings()),
        ]
    )


def rows_html(headers: tuple[str, ...], rows: list, name: str = "", raw: bool = False) -> str:
    """Return a table that scrolls sideways where it is too wide."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell if raw else escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def html_figure(title: str, series: dict, colours: dict[str, str], x: str, y: str) -> str:
    """Return a chart with its caption."""
    drawn = svg_chart(series, colours, x, y, title)
    return f"<figure>{drawn}<figcaption>{escape(title)}</figcaption></figure>"


# ---- The report of a comparison: Markdown, CSV and one HTML page.


COLUMNS = (
    "task",
    "set",
    "metric",
    "scheme",
    "seeds",
    "mean",
    "low",
    "high",
    "other",
    "difference",
    "difference_low",
    "difference_high",
    "p",
    "p_holm",
    "detectable",
    "seeds_above",
    "seeds_below",
    "parameters",
    "processor_seconds",
    "megabytes",
)


def write_report(comparison: Comparison) -> int:
    """Write report.md, report.csv and report.html beside the results; there must be some."""
    found = [(cell, comparison.result(cell)) for cell in comparison.cells]
    results = [(cell, result) for cell, result in found if result is not None]
    if not results:
        raise UserError(
            f"{comparison.results} has no result of this comparison and this code: first `relpos "
            "compare run`, or --any-code for results of other versions"
        )
    summary = summarise(comparison.spec, results, len(found))
    texts = {"md": markdown(summary), "csv": as_csv(summary), "html": html_page(summary)}
    for ending, text in texts.items():
        write_text(comparison.results / f"report.{ending}", text)
    print(texts["md"])
    print(f"written: {comparison.results}/report.md, .csv, .html")
    return 0


def as_csv(summary: Summary) -> str:
    """Return a line for every scheme, and every difference, of every table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for part in summary.tasks:
        for table in part.tables:
            place = {"task": part.label, "set": table.set, "metric": table.metric.name}
            for scheme, row in table.rows.items():
                value, cost = row.estimate, part.costs[scheme]
                writer.writerow(
                    place
                    | {
                        "scheme": scheme,
                        "seeds": len(row.seeds),
                        "mean": f"{value.mean:.6g}",
                        "low": f"{value.low:.6g}",
                        "high": f"{value.high:.6g}",
                        "parameters": cost.parameters,
                        "processor_seconds": f"{cost.seconds:.1f}",
                        "megabytes": f"{cost.megabytes:.0f}",
                    }
                )
            for one in table.differences:
                value = one.estimate
                writer.writerow(
                    place
                    | {
                        "scheme": one.scheme,
                        "other": one.other,
                        "seeds": one.seeds,
                        "difference": f"{value.mean:.6g}",
                        "difference_low": f"{value.low:.6g}",
                        "difference_high": f"{value.high:.6g}",
                        "p": f"{one.p:.6g}",
                        "p_holm": f"{one.holm:.6g}",
                        "detectable": f"{one.detectable:.6g}",
                        "seeds_above": one.above,
                        "seeds_below": one.below,
                    }
                )
    return text.getvalue()
