"""Read a model to convert, in whichever library's format it is."""

from __future__ import annotations

from pathlib import Path

from relpos_fairseq.conversion import exported
from relpos_fairseq.conversion.checkpoints import from_checkpoint, read_file
from relpos_fairseq.conversion.config_keys import read_config
from relpos_fairseq.conversion.huggingface_import import read_huggingface
from relpos_fairseq.conversion.marian import MARIAN, read_marian
from relpos_fairseq.conversion.opennmt import read_opennmt
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.source import EncoderSource, Source
from relpos_fairseq.conversion.transformer_xl_original import is_original_xl, read_original_xl
from relpos_fairseq.conversion.vocabulary import symbols_of
from relpos_fairseq.text.assets import asset_files_of, find_assets, label_names, text_folders


def read(path: Path, data: Path | None = None, length: int | None = None) -> Source:
    """Read a model: a checkpoint of fairseq's, ours or OpenNMT-py's, a released Transformer-XL, a transformers folder.

    Args:
        path: the file or folder.
        data: where its dictionary and tokenizer are; None: beside it.
        length: positions of a translation model that is imported; None: its own.

    Raises:
        ConversionError: it is absent, truncated, or no model that is converted here, or `data` says nothing of it.
    """
    path = _model_in(path)
    if is_original_xl(path):
        return read_original_xl(path, data)
    source = _read(path, length)
    if isinstance(source, EncoderSource) and source.vocabulary is None:
        return _with_text(source, data)
    if data is not None:
        raise ConversionError(f"--data {data}: {path} has its own vocabulary: leave it out")
    return source


def read_encoder(path: Path) -> EncoderSource:
    """Read a BERT or RoBERTa, without looking for its text.

    Raises:
        ConversionError: as `read`, or the model generates.
    """
    source = _read(_model_in(path), None)
    if not isinstance(source, EncoderSource):
        raise ConversionError(f"{path} holds a model that generates: give a RoBERTa or BERT")
    return source


def _read(path: Path, length: int | None) -> Source:
    if not path.is_dir():
        checkpoint = read_file(path)
        opennmt = {"vocab", "opt"} <= checkpoint.keys()
        return read_opennmt(path, checkpoint, length) if opennmt else from_checkpoint(checkpoint, path)
    config = read_config(path)
    kind = config.get("model_type")
    if kind == MARIAN:
        return read_marian(path, config, length)
    if kind in exported.GENERATING_TYPES:
        return exported.read_exported_generating(path, config)
    return exported.read_exported_roberta(path, config) if kind == exported.ROBERTA_TYPE else read_huggingface(path)


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


def _with_text(source: EncoderSource, data: Path | None) -> EncoderSource:
    """Find a checkpoint's dictionary, tokenizer and names of classes in `data`, or in `text/` beside it.

    Raises:
        ConversionError: `data` holds none.
    """
    if data is not None:
        source.files = asset_files_of(data)
        if not source.files:
            raise ConversionError(f"--data {data} holds neither dict.txt nor a tokenizer")
        rows = len(symbols_of(source.files)) or source.rows
        if rows != source.rows:
            raise ConversionError(f"--data {data}: its dict.txt makes {rows} rows, and the model has {source.rows}")
    elif source.path.is_file() and text_folders(source.path.parent):
        data = find_assets(source.path, None)
        source.files = asset_files_of(data)
    name = f"classification_heads.{source.task.get('classification_head_name')}.out_proj.weight"
    if not source.labels and name in source.state and not source.task.get("regression_target"):
        source.labels = label_names(data or source.path.parent, len(source.state[name]))
    return source
