"""The report of a comparison: Markdown, CSV and one HTML page."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from relpos_fairseq.comparison.report.document import markdown
from relpos_fairseq.comparison.report.page import page
from relpos_fairseq.comparison.report.summary import Summary, summarise
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_text

if TYPE_CHECKING:
    from relpos_fairseq.comparison.runs import Comparison

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
        raise PreparationError(
            f"{comparison.results} has no result of this comparison and this code: first `relpos "
            "compare run`, or --any-code for results of other versions"
        )
    summary = summarise(comparison.spec, results, len(found))
    texts = {"md": markdown(summary), "csv": as_csv(summary), "html": page(summary)}
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
