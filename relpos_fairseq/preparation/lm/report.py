"""What was made: the manifests and the table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from relpos_fairseq.engine.files import Hashes
from relpos_fairseq.engine.manifest import write_manifest
from relpos_fairseq.engine.tables import table
from relpos_fairseq.preparation.unknown import warn_of_unknown

COLUMNS = ("tokens", "lines", "words", "characters", "bytes", "unknown", "documents")
ENCODE = "encode-"


def write_manifests(
    folders: Sequence[Path],
    out: Path,
    command: Sequence[str],
    texts: Mapping[str, Path],
    made: Sequence[Path],
    counts: Mapping[str, Mapping],
    facts: Mapping[str, object],
    hashes: Hashes,
) -> None:
    """Write `manifest.json`, of the whole and of every shard, and print the table.

    Args:
        folders: One a shard; `out` itself where there is one.
        out: The folder of the whole.
        command: The program and its arguments.
        texts: The splits' files, by label.
        made: What was made of them.
        counts: Every stage's counts; those of `encode-SPLIT` are by shard.
        facts: The level and the size of the vocabulary.
        hashes: Those of files that stages have read.
    """
    shards = {
        name.removeprefix(ENCODE): list(found.values()) for name, found in counts.items() if name.startswith(ENCODE)
    }
    splits = {split: add_up(parts) for split, parts in shards.items()}
    write_manifest(
        out / "manifest.json",
        command=command,
        inputs=texts,
        outputs=made,
        stages={name: found for name, found in counts.items() if not name.startswith(ENCODE)},
        extra={**facts, "splits": splits},
        hashes=hashes,
    )
    for number, folder in enumerate(folders if len(folders) > 1 else []):
        own = {split: parts[number] for split, parts in shards.items() if number < len(parts)}
        write_manifest(
            folder / "manifest.json",
            command=command,
            inputs=texts,
            outputs=[path for path in made if path.parent == folder],
            extra={**facts, "shard": number, "splits": own},
            hashes=hashes,
        )
    columns = [name for name in COLUMNS if any(name in found for found in splits.values())]
    rows = [[split, *(found.get(c, 0) for c in columns)] for split, found in splits.items()]
    print(table(rows, ["split", *columns]))
    if facts["level"] != "word":  # whose vocabulary leaves rare words out
        parts = {f"split {name}": found for name, found in splits.items()}
        warn_of_unknown({name: (p.get("unknown", 0), p["tokens"]) for name, p in parts.items()})
    print(f"{facts['level']} level, {facts['vocabulary']:,} entries in the dictionary", flush=True)


def add_up(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Add the counts of shards."""
    keys = {key for part in parts for key in part}
    return {key: sum(part.get(key, 0) for part in parts) for key in keys}
