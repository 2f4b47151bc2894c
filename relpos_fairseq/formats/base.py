"""Read a model of whichever library: one table says which format knows a file or folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.formats.exported import TYPES, read_exported
from relpos_fairseq.formats.fairseq import from_checkpoint, read_file
from relpos_fairseq.formats.huggingface_folder import FAMILIES
from relpos_fairseq.formats.huggingface_import import read_huggingface
from relpos_fairseq.formats.marian import MARIAN, read_marian
from relpos_fairseq.formats.opennmt import read_opennmt
from relpos_fairseq.formats.transformer_xl_original import is_original_xl, read_original_xl
from relpos_fairseq.formats.transformers_folder import read_config
from relpos_fairseq.formats.vocabulary import symbols_of, tokenizer_place
from relpos_fairseq.heads import CLASSIFIER
from relpos_fairseq.io.tensor_files import building
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text import load_tokenizer
from relpos_fairseq.text.assets import asset_files_of, label_names, text_folders
from relpos_fairseq.text.folders import holds_tokenizer


def read(path: Path, data: Path | None = None, length: int | None = None) -> SavedModel:
    """Read a model: a RoBERTa of fairseq's or ours, OpenNMT-py's, a released Transformer-XL, a transformers folder.

    Args:
        path: the file or folder.
        data: where its dictionary and tokenizer are; None: beside it.
        length: positions of a translation model that is imported; None: its own.

    Raises:
        ConversionError: it is absent, truncated, or no model that is converted here, or `data` says nothing of it.
    """
    saved = _read(_model_in(path), data=data, max_positions=length)
    if saved.is_encoder and not saved.texts:
        _find_text(saved, data)
    elif data is not None and "data" not in saved.takes:
        raise ConversionError(f"--data {data}: {saved.path} has its own vocabulary: leave it out")
    if saved.is_encoder and (place := tokenizer_place(saved.files)) and holds_tokenizer(place):
        load_tokenizer(place)  # a broken one would be found when text is read
    return saved


def read_encoder(path: Path) -> SavedModel:
    """Read a BERT or RoBERTa, without looking for its text.

    Raises:
        ConversionError: as `read`, or the model generates.
    """
    saved = _read(_model_in(path))
    if not saved.is_encoder:
        raise ConversionError(f"{path} holds a model that generates: give a RoBERTa or BERT")
    return saved


def _read(path: Path, **options: Any) -> SavedModel:
    """Read a model by the one format that knows it, which is given those of the options that it takes.

    Raises:
        ConversionError: none does; the error lists all.
    """
    if path.is_dir():
        content = read_config(path)
    else:  # what the original code wrote cannot be unpickled without it
        content = {} if is_original_xl(path) else read_file(path)
    for one in FORMATS:
        if one.recognises(path, content):
            with building(path):
                saved = one.read(path, content, **{name: options.get(name) for name in one.takes})
            saved.takes = one.takes
            return saved
    said = f"says model_type {content.get('model_type')!r}" if path.is_dir() else "holds no model"
    raise ConversionError(f"{path} {said}, and is none of what is read here: {'; '.join(one.name for one in FORMATS)}")


@dataclass(frozen=True)
class Format:
    """A kind of file or folder; of each model at most one recognises it, by its path and its content or config.json."""

    name: str  # in the error that lists all
    recognises: Callable[[Path, dict[str, Any]], bool]
    read: Callable[..., SavedModel]
    takes: tuple[str, ...] = ()  # options of `read`


def _says(*kinds: str) -> Callable[[Path, dict[str, Any]], bool]:
    """Return whether a folder's config.json has one of the model_types."""
    return lambda path, config: path.is_dir() and config.get("model_type") in kinds


def _is_opennmt(path: Path, content: dict[str, Any]) -> bool:
    return path.is_file() and {"vocab", "opt"} <= content.keys()


def _is_fairseq(path: Path, content: dict[str, Any]) -> bool:
    return path.is_file() and "model" in content and not _is_opennmt(path, content)


FORMATS = (
    Format(f"{', '.join(FAMILIES)} of transformers", _says(*FAMILIES), read_huggingface),
    Format(f"{MARIAN} of transformers", _says(MARIAN), read_marian, ("max_positions",)),
    Format("folders of `relpos export transformers`", _says(*TYPES), read_exported),
    Format("RoBERTas of fairseq's and ours", _is_fairseq, from_checkpoint),
    Format("checkpoints of OpenNMT-py", _is_opennmt, read_opennmt, ("max_positions",)),
    Format(
        "model.pt of Transformer-XL's released code", lambda path, _: is_original_xl(path), read_original_xl, ("data",)
    ),
)


def _model_in(path: Path) -> Path:
    """Return the one checkpoint of a folder that is no model of transformers; else the path itself."""
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.pt"))
    if len(files) != 1:
        raise ConversionError(
            f"{path} has no config.json of a Hugging Face model, and {len(files)} .pt files: give the checkpoint itself"
        )
    return files[0]


def _find_text(saved: SavedModel, data: Path | None) -> None:
    """Find a checkpoint's dictionary, tokenizer and names of classes in `data`, or in `text/` beside it.

    Raises:
        ConversionError: `data` holds none, or the dictionary is of another model.
    """
    if data is not None:
        saved.files = asset_files_of(data)
        if not saved.files:
            raise ConversionError(f"--data {data} holds neither dict.txt nor a tokenizer")
    elif saved.path.is_file() and text_folders(saved.path.parent):
        data = saved.find_text(None)
        saved.files = asset_files_of(data)
    symbols_of(saved.files, saved.rows)
    classifier = next((one for one in saved.heads if one.trained and one.head is CLASSIFIER), None)
    if not saved.origin.labels and classifier and not saved.task.get("regression_target"):
        saved.origin.labels = label_names(data or saved.path.parent, classifier.outputs)
