"""A translation checkpoint, and sentences that an exported model is compared with it on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.export.extras import ExportError
from relpos_fairseq.inference.beside import text_folder
from relpos_fairseq.pictures.model import load

BEAM = 4
MAX_LENGTH = 200  # fairseq's --max-len-b


def load_translation(checkpoint: Path, data: Path | None) -> tuple[nn.Module, Any]:
    """Load a checkpoint's model and task with its dictionaries.

    Args:
        checkpoint: the file.
        data: folder of dictionaries; None: the one that the checkpoint was trained on, which has
            the validation set, or else the text/ beside the checkpoint.

    Raises:
        ExportError: no such folder, or no model with two dictionaries.
    """
    if data is None and checkpoint.is_file():
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
        trained_on = str((state["cfg"] or {}).get("task", {}).get("data") or "").split(":")[0]
        data = Path(trained_on)
        if not trained_on or not any(data.glob("dict*.txt")):
            try:
                data = text_folder(checkpoint, None, trained_on)
            except PreparationError as error:
                raise ExportError(str(error)) from None
    model, task = load(checkpoint, data)
    if getattr(task, "source_dictionary", None) is None or not hasattr(model, "encoder"):
        raise ExportError(f"{checkpoint} holds a {type(model).__name__}: no translation model")
    return model, task


def sentences(task: Any, count: int, seed: int = 1) -> tuple[list[Tensor], str]:
    """Return source sentences, each ending in eos, and what they are.

    Args:
        task: the checkpoint's.
        count: at most so many.
        seed: of random sentences, which serve where the data has no validation set.
    """
    try:
        task.load_dataset("valid")
        found = task.dataset("valid")
        chosen = [found[index]["source"] for index in range(min(count, len(found)))]
        return chosen, f"{len(chosen)} sentences of the validation set"
    except FileNotFoundError:
        words = task.source_dictionary
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 40, (min(count, 32),), generator=generator).tolist()
        drawn = [torch.randint(4, len(words), (n,), generator=generator) for n in lengths]
        end = torch.tensor([words.eos()])
        return [torch.cat([part, end]) for part in drawn], f"{len(drawn)} random sentences"


def in_batches(lengths: Sequence[int], tokens: int = 4096, rows: int = 64) -> Iterable[list[int]]:
    """Yield sentences' numbers in batches, longest first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if batch and (len(batch) == rows or (len(batch) + 1) * lengths[batch[0]] > tokens):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def padded(rows: Sequence[Tensor], pad: int, left: bool) -> Tensor:
    """Lay sentences beside each other: (B, L)."""
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, True, pad, padding_side=side)


@torch.inference_mode()
def translate(
    model: nn.Module, task: Any, rows: Sequence[Tensor], beam: int = BEAM
) -> list[list[str]]:
    """Translate by fairseq's own search: the symbols of each sentence's best hypothesis."""
    words = task.target_dictionary
    search = SequenceGenerator([model], words, beam_size=beam, max_len_b=MAX_LENGTH)
    found: list[list[str]] = [[] for _ in rows]
    with progress(total=len(rows), description="translate", unit="sentences") as bar:
        for batch in in_batches([len(row) for row in rows]):
            source = padded([rows[n] for n in batch], task.source_dictionary.pad(), left=True)
            lengths = torch.tensor([len(rows[n]) for n in batch])
            sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
            for number, best in zip(batch, search.generate([model], sample), strict=True):
                tokens = utils.strip_pad(best[0]["tokens"], words.pad())
                found[number] = [words[index] for index in tokens if index != words.eos()]
            bar.update(len(batch))
    return found
