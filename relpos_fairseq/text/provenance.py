"""Hash the dictionaries and subwords of a training, keep the hashes in its checkpoints, and compare them on loading.

Without that, a dictionary of the same size in another order, or other merges, give nonsense and no error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import sha256_of
from relpos_fairseq.io.reading import ordinary, read_json

KEY = "trained_with"  # of a checkpoint; a dictionary of dictionaries of strings, which weights_only loads
SIDES = ("source", "target")
MANIFEST = "manifest.json"
TEXT_SETTINGS = ("bpe", "languages", "normalization", "tokenizer")  # of a manifest: see `assets.read_text`


def record(task: Any, files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Return the hashes that a checkpoint of a training keeps.

    Args:
        task: the training's, with its dictionaries.
        files: the files of its text by their names, as `assets.asset_files` returns them.
    """
    return {"dictionaries": of_task(task), "files": of_files(files)}


def of_task(task: Any) -> dict[str, str]:
    """Return the hashes of the dictionaries of a task's source and target, if it has them."""
    found = {}
    for side in SIDES:
        try:
            dictionary = getattr(task, f"{side}_dictionary", None)
        except NotImplementedError:
            continue
        if dictionary is not None and hasattr(dictionary, "symbols"):
            found[side] = of_symbols(dictionary.symbols[: len(dictionary)])
    return found


def of_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the hashes of a text's files by their names.

    Of a dict.txt that is the hash of its symbols without their counts, and of a manifest that of the settings by which
    text is read: the versions of packages that it names as well change nothing.
    """
    return {name: _of_file(path) for name, path in files.items()}


def _of_file(path: Path) -> str:
    if path.name == MANIFEST:
        return hashlib.sha256(json.dumps(text_facts(read_json(path)), sort_keys=True).encode()).hexdigest()
    if not path.name.startswith("dict"):
        return sha256_of(path)
    lines = ordinary(path).read_bytes().rstrip(b"\n").split(b"\n")
    return of_symbols(line.rstrip().removesuffix(b"#fairseq:overwrite").rstrip().rpartition(b" ")[0] for line in lines)


def text_facts(manifest: Any) -> dict[str, Any]:
    """Return what a manifest says of how text becomes symbols."""
    settings = manifest.get("settings") if isinstance(manifest, dict) else None
    found = {name: settings.get(name) for name in TEXT_SETTINGS} if isinstance(settings, dict) else {}
    return found | {"level": manifest.get("level") if isinstance(manifest, dict) else None}


def of_symbols(symbols: Iterable[str | bytes]) -> str:
    """Return the hash of symbols in their order."""
    digest = hashlib.sha256()
    for symbol in symbols:
        digest.update((symbol if isinstance(symbol, bytes) else symbol.encode("utf-8", "surrogatepass")) + b"\n")
    return digest.hexdigest()


def read(state: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the hashes that a checkpoint keeps; none if it is older or holds something else under their name."""
    kept = state.get(KEY)
    if not isinstance(kept, Mapping):
        return {}
    return {part: dict(kept[part]) for part in ("dictionaries", "files") if isinstance(kept.get(part), Mapping)}


def differing(kept: Mapping[str, Mapping[str, str]], files: Mapping[str, Path]) -> list[str]:
    """Return the names of files that differ from those of a checkpoint's training.

    Absent files do not count, since their readers say so, but for the manifest: without it text is read in another way.
    """
    known = kept.get("files", {})
    found = of_files({name: path for name, path in files.items() if name in known})
    absent = {MANIFEST} & known.keys() - found.keys()
    return sorted(absent | {name for name in found if found[name] != known[name]})


def differing_sides(kept: Mapping[str, Mapping[str, str]], task: Any) -> list[str]:
    """Return the sides whose dictionary in a task differs from that of a checkpoint's training."""
    known, found = kept.get("dictionaries", {}), of_task(task)
    return [side for side in SIDES if side in known and side in found and known[side] != found[side]]


def check_task(state: Mapping[str, Any], task: Any, path: Path | str) -> None:
    """Raise an error for a loaded checkpoint that was trained with other dictionaries than a task has read."""
    if sides := differing_sides(read(state), task):
        data = getattr(getattr(task, "cfg", None) or getattr(task, "args", None), "data", None)
        raise UserError(
            f"{path} was trained with another {' and '.join(sides)} dictionary than that of {data}: give the data "
            f"folder of its training, or binarise with its dictionaries (--srcdict, --tgtdict)"
        )
