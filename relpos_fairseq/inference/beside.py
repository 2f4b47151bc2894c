"""What lies beside a checkpoint so that its folder is enough: dictionaries, units, manifest.

Training copies them into `text/` of --save-dir.  The folder is of the data's own shape, so that it
also stands for the data folder where fairseq asks for dictionaries.
"""

from __future__ import annotations

from pathlib import Path

from relpos_fairseq.data.tokenizers import FILES
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_folder, copy_file
from relpos_fairseq.inference.text import UNIT_FILES, manifest_of, piece_file, unit_file

FOLDER = "text"
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
    """Copy a data folder's text files into `folder`/text; what is the same stays.

    Returns:
        That folder.
    """
    there, files = folder / FOLDER, files_of(data, tokenizer)
    if any(path.is_relative_to(there) for path in files.values()):
        return there
    known = {str(p.relative_to(there)): p for p in there.rglob("*") if p.is_file()}
    same = known.keys() == files.keys() and all(
        known[name].read_bytes() == path.read_bytes() for name, path in files.items()
    )
    if files and not same:
        with atomic_folder(there) as temporary:
            for name, path in files.items():
                copy_file(path, temporary / name)
    return there


def text_folder(checkpoint: Path, data: Path | None, trained_on: str = "") -> Path:
    """Return the folder of a checkpoint's dictionaries and units.

    Args:
        checkpoint: the model's file.
        data: the data folder that the user names; None: what lies beside the checkpoint.
        trained_on: the data folder that the checkpoint names, for the error.

    Raises:
        PreparationError: there is none.
    """
    places = [data] if data else [checkpoint.parent / FOLDER, checkpoint.parent]
    for place in places:
        if any(any((place / part).glob("dict*.txt")) for part in PARTS[:2]):
            return place
    if data:
        raise PreparationError(f"--data {data} has no dict.txt and no dict.LANGUAGE.txt")
    where = f" (it was {trained_on})" if trained_on else ""
    raise PreparationError(
        f"no {FOLDER}/ beside {checkpoint}, which newer trainings write: name the data folder that "
        f"it was trained on with --data{where}"
    )
