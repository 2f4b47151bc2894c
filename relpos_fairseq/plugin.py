"""What happens when the plugin registers with fairseq, in reading order.

`relpos_fairseq/__init__.py` calls `register` once fairseq has been imported.  Where files of a
folder need fairseq, the folder's `__init__.py` imports it, so that the plugin has registered before
the first of these files begins.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from relpos_fairseq.io.errors import UserError

PAGE = Path(__file__).parent / "patches" / "README.md"
NAME = re.compile(r"`([\w.]+)`")
SWITCH = "RELPOS_PATCHES"
ON = {"all": ("positions", "platform", "fault"), "needed": ("positions", "platform")}  # kinds, by the switch's value


class Replacement(NamedTuple):
    """A row of the page's table, or one of a row's several."""

    kind: str
    theirs: str  # the function or class of fairseq's; empty: `ours` is called once and changes several
    ours: str  # below this package; a function is given the original first
    why: str
    tests: str


@functools.cache  # once a process, though this package may be imported again
def register() -> None:
    """Register our names with fairseq, and replace what of fairseq the page lists."""
    rows = chosen()
    register_ours()
    for row in rows:
        replace(row.theirs, resolve_name(f"{__package__}.{row.ours}"))


def register_ours() -> None:
    """Import every file that registers a name with fairseq."""
    import relpos_fairseq.criterions.cross_entropy
    import relpos_fairseq.criterions.question_answering
    import relpos_fairseq.criterions.sentence_prediction_glue
    import relpos_fairseq.inference.checkpoints.hooks
    import relpos_fairseq.models.relpos_roberta
    import relpos_fairseq.models.relpos_transformer
    import relpos_fairseq.models.relpos_transformer_lm
    import relpos_fairseq.models.relpos_transformer_xl
    import relpos_fairseq.optim.adam
    import relpos_fairseq.tasks.question_answering
    import relpos_fairseq.tasks.segment_language_modeling  # noqa: F401


def chosen() -> list[Replacement]:
    """Return the replacements that are on: all, or with RELPOS_PATCHES=needed those without which ours do not work."""
    asked = os.environ.get(SWITCH) or "all"
    if asked not in ON:
        from relpos_fairseq.patches.training import speak_as_a_command

        speak_as_a_command()
        raise UserError(f"{SWITCH} must be {' or '.join(ON)}, got {asked!r}")
    return [row for row in replacements() if row.kind in ON[asked]]


def replacements() -> list[Replacement]:
    """Return the rows of the table of patches/README.md, the page's only one of six columns, in its order."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count(" | ") > 2]
    rows = []
    for theirs, ours, kind, why, _, tests in (line[2:-2].split(" | ") for line in lines[1:]):
        names = NAME.findall(theirs) or [""]  # in words: several, which `ours` changes
        rows += [Replacement(kind, *pair, why, tests) for pair in zip(names, NAME.findall(ours), strict=True)]
    return rows


def replace(theirs: str, ours: Callable) -> None:
    """Put a function or class of ours in the place of fairseq's; in a command's module only where it is running."""
    from relpos_fairseq.patches.processes import running

    where, _, name = theirs.rpartition(".")
    if not theirs:
        ours()
        return
    owner: Any = running(where) if where.startswith("fairseq_cli.") else resolve_name(where)
    if where.startswith("fairseq_cli.") and not hasattr(owner, name):  # it may be loading: fairseq, and the plugin
        return
    if isinstance(ours, type):
        setattr(owner, name, ours)
        return
    found = getattr(owner, name)
    original = getattr(found, "__func__", found)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(owner, name, classmethod(replacement) if original is not found else replacement)
