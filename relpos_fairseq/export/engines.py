"""What translates: a checkpoint, or an export that another engine runs."""

from __future__ import annotations

from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.inference.translator import Translator


def open_translator(path: Path, data: Path | None = None, cpu: bool = False) -> Translator:
    """Return what translates: a checkpoint, or an exported folder.

    Args:
        path: a checkpoint's file, or the folder of an export.
        data: data folder of a checkpoint that has no text/ beside it.
        cpu: use no GPU.

    Raises:
        PreparationError: it is neither, or no translation model.
    """
    if (path / "model.bin").is_file():  # CTranslate2's
        from relpos_fairseq.export import ct2_translator

        return ct2_translator.load(path, cpu)
    if path.is_dir():
        raise PreparationError(f"{path} is a folder: name the checkpoint in it")
    from relpos_fairseq.inference.checkpoints import beam  # with fairseq, which exports do without

    return beam.load(path, data, cpu)
