"""The report as one HTML page: no JavaScript, no other file, readable on a phone."""

from __future__ import annotations

from html import escape

from relpos_fairseq.comparison.report.chart import COLOURS, chart
from relpos_fairseq.comparison.report.document import (
    COSTS,
    HEADERS,
    READING,
    caption,
    costs_of,
    made_of,
    others_of,
    rows_of,
)
from relpos_fairseq.comparison.report.summary import Part, Summary, Table
from relpos_fairseq.engine.tables import counted

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


def page(summary: Summary) -> str:
    """Return the page."""
    title = escape(summary.title)
    parts = [f"<h1>{title}</h1>", f"<p>{escape(READING).replace('**bold**', '<b>bold</b>')}</p>"]
    if summary.done < summary.total:
        parts.append(warning(f"Not finished: {summary.done} of {counted(summary.total, 'cell')}"))
    if len(summary.codes) > 1:
        parts.append(warning(f"Results of {len(summary.codes)} versions of the code are mixed"))
    parts += [section(part, summary.baseline) for part in summary.tasks]
    parts += ["<h2>How it was made</h2>", rows_html(("what", "value"), made_of(summary), "made")]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def warning(text: str) -> str:
    return f'<p class="warning">{escape(text)}.</p>'


def section(part: Part, baseline: str) -> str:
    metric = part.tables[0].metric.name
    colours = dict(zip(part.costs, (COLOURS * 3)[: len(part.costs)], strict=False))
    figures = [
        figure(f"{metric} by length, mean over seeds", part.lengths, colours, part.unit, metric),
        figure("Validation loss during training, mean over seeds", part.curves, colours, "updates", "bits a token"),
    ]
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return "\n".join(
        [
            f"<h2>{escape(part.label)}</h2>",
            *(scores(table, baseline) for table in part.tables),
            f'<div class="pictures">{"".join(figures)}</div><div class="legend">{legend}</div>',
            "<p>Cost, in the median over seeds:</p>",
            rows_html(COSTS, costs_of(part)),
        ]
    )


def scores(table: Table, baseline: str) -> str:
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
            *map(warning, table.warnings()),
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


def figure(title: str, series: dict, colours: dict[str, str], x: str, y: str) -> str:
    """Return a chart with its caption."""
    drawn = chart(series, colours, x, y, title)
    return f"<figure>{drawn}<figcaption>{escape(title)}</figcaption></figure>"
