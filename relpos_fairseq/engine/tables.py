"""Tables for the eye."""

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence], headers: Sequence[str]) -> str:
    """Return a Markdown table; integers have thousands separators."""
    import tabulate

    return tabulate.tabulate(list(rows), headers, tablefmt="github", intfmt=",", floatfmt=",.2f")
