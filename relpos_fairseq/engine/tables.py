"""Tables for the eye."""

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence], headers: Sequence[str], written: bool = False) -> str:
    """Return a Markdown table; integers have thousands separators, `written` cells stay."""
    import tabulate

    formats = {"disable_numparse": True} if written else {"intfmt": ",", "floatfmt": ",.2f"}
    return tabulate.tabulate(list(rows), headers, tablefmt="github", **formats)


def counted(number: int, what: str) -> str:
    """Return a number of things in words: `1 seed`, `2 seeds`."""
    return f"{number:,} {what}{'s' * (number != 1)}"
