"""Write the model card beside checkpoints and exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.manifests import Manifest, versions
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.version import __version__

FILE = "MODEL_CARD.md"


def write_card(folder: Path, facts: Mapping[str, object], command: str, manifest: Path) -> None:
    """Write the card of a training: facts about the model under their names, the command, and the data's manifest.

    The data are left out if they have no manifest.
    """
    parts = ["# Model card", _rows(facts), "## Command", f"```\n{command}\n```"]
    data = read_json(manifest, Manifest, None)
    if data is not None:
        files = [
            (kind.removesuffix("s"), name, one.get("bytes", ""), f"`{one.get('sha256', '')}`")
            for kind in ("inputs", "outputs")
            for name, one in data.get(kind, {}).items()
        ]
        parts += ["## Data", f"```\n{data.get('command', '')}\n```"]
        parts.append(table(files, ("", "file", "bytes", "sha256")))
    found = versions() | {"relpos_fairseq": __version__}
    try:
        import torch

        found["torch"] = str(torch.__version__)
    except ImportError:
        pass
    parts += ["## Versions", _rows(found)]
    write_text(folder / FILE, "\n\n".join(parts) + "\n")


def write_export_card(checkpoint: Path, folder: Path, format: str, facts: Mapping[str, object]) -> None:
    """Write the card of an export: the export's facts, then the checkpoint's own card."""
    parts = [f"# Model card: {format} of {checkpoint.name}", _rows(facts)]
    own = checkpoint.parent / FILE
    if own.is_file():
        text = own.read_text(encoding="utf-8")
        parts.append("# The checkpoint\n" + text.removeprefix("# Model card\n").rstrip("\n"))
    write_text(folder / FILE, "\n\n".join(parts) + "\n")


def _rows(facts: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    rows = [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in facts.items()]
    return table([(name, value.replace("|", "\\|")) for name, value in rows], ("", "value"))
