"""What lies beside a checkpoint so that its folder is enough: dictionaries, units, manifest.

Training copies them into `text/` of --save-dir, and into `text-HASH/` where `text/` is another model's.  The folder
is of the data's own shape, so that it also stands for the data folder where fairseq asks for dictionaries.  Which of
several is a checkpoint's is known by the hashes that it keeps (`provenance`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relpos_fairseq.data.tokenizers import FILES
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_folder, copy_file, sha256_of
from relpos_fairseq.inference import provenance
from relpos_fairseq.inference.text import UNIT_FILES, manifest_of, piece_file, unit_file

FOLDER = "text"
HASHED = re.compile(r"text-[0-9a-f]{8}")
OWN = (*FILES, *UNIT_FILES, "word_starts.txt")
PARTS = ("", "input0", "label")  # of GLUE's data, input0 and label have dictionaries


def files_of(data: Path, tokenizer: Path | None = None) -> dict[str, Path]:
    """Return the files that a data folder's text needs, by their places in `text/`.

    The tokenizer may lie in a folder of its own.
    """
    found = {}
    for place in (data, *([tokenizer] if tokenizer else [])):
        for part in PARTS:
            for path in sorted((place / part).glob("dict*.txt")) if place == data else []:
                found[str(Path(part, path.name))] = path
            for path in sorted((place / part).glob(piece_file("*"))):
                found[str(Path(part, path.name))] = path
            found |= {str(Path(part, n)): place / part / n for n in OWN if (place / part / n).is_file()}
    if manifest := manifest_of(data):
        found["manifest.json"] = manifest
        for kind in ("subword-nmt", "sentencepiece"):
            try:
                path = unit_file(data, kind)
            except PreparationError:
                continue  # the manifest's is the other, or none
            found.setdefault(path.name, path)
    return found


def copy_text(data: Path, folder: Path, tokenizer: Path | None = None) -> Path:
    """Copy a data folder's text files beside the checkpoints of `folder`; what is the same stays.

    They lie in `text/`. Where that is another model's, or a user's, they lie in a folder that is named for them,
    `text-HASH/`. Nothing that lies there is changed or removed.

    Returns:
        That folder.

    Raises:
        PreparationError: `text-HASH/` holds something else, as its name says.
    """
    there, files = folder / FOLDER, files_of(data, tokenizer)
    for place in text_folders(folder):
        if any(path.is_relative_to(place) for path in files.values()) or holds(place, files):
            return place
    if not files:
        return there
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0{sha256_of(path)}\n".encode())
    for place in (there, folder / f"{FOLDER}-{digest.hexdigest()[:8]}"):
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            with atomic_folder(place) as temporary:
                for name, path in files.items():
                    copy_file(path, temporary / name)
            return place
    raise PreparationError(f"{place} does not hold what its name says: move it, or what is written beside it")


def text_folders(folder: Path) -> list[Path]:
    """Return the folders of text beside the checkpoints of a folder, `text/` first."""
    named = sorted(path for path in folder.glob(f"{FOLDER}-*") if HASHED.fullmatch(path.name))
    return [path for path in (folder / FOLDER, *named) if path.is_dir()]


def holds(place: Path, files: Mapping[str, Path]) -> bool:
    """Say whether a folder of text holds these files, and no other that the reading of text depends on."""
    known = {name: path for name, path in files_of(place).items() if path.is_relative_to(place)}
    return known.keys() == files.keys() and all(
        known[name].read_bytes() == path.read_bytes() for name, path in files.items()
    )


def text_folder(
    checkpoint: Path, data: Path | None, trained_on: str = "", state: Mapping[str, Any] | None = None
) -> Path:
    """Return the folder of a checkpoint's dictionaries and units.

    Args:
        checkpoint: the model's file.
        data: the data folder that the user names; None: what lies beside the checkpoint.
        trained_on: the data folder that the checkpoint names, for the error.
        state: the loaded checkpoint, whose hashes are compared; None: it is read if there are several folders.

    Raises:
        PreparationError: there is none, or it is of another training.
    """
    places = [data] if data else [*text_folders(checkpoint.parent), checkpoint.parent]
    places = [place for place in places if any(any((place / part).glob("dict*.txt")) for part in PARTS[:2])]
    kept = provenance.read(state) if state is not None else _hashes_of(checkpoint) if places else {}
    differing = [provenance.differing(kept, files_of(place)) for place in places]
    if [] in differing:
        return places[differing.index([])]
    if places:
        raise PreparationError(
            f"{checkpoint} was trained with another {', '.join(differing[0])} than {places[0]} holds: name the data "
            f"folder of its training with --data"
        )
    if data:
        raise PreparationError(f"--data {data} has no dict.txt and no dict.LANGUAGE.txt")
    where = f" (it was {trained_on})" if trained_on else ""
    raise PreparationError(
        f"no {FOLDER}/ beside {checkpoint}, which newer trainings write: name the data folder that "
        f"it was trained on with --data{where}"
    )


def _hashes_of(checkpoint: Path) -> dict[str, dict[str, str]]:
    """Return the hashes that a checkpoint keeps, without reading its tensors; nothing where it does not load."""
    import torch

    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # an older format, a folder, or no checkpoint: whoever loads it says so
        return {}
    return provenance.read(state) if isinstance(state, Mapping) else {}
