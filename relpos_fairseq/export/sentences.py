"""A translation checkpoint, and sentences that an exported model is compared with it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.export.extras import ExportError
from relpos_fairseq.inference.beside import text_folder
from relpos_fairseq.inference.checkpoints.trusted import read_trusted
from relpos_fairseq.inference.translator import Batching, Search, batches
from relpos_fairseq.pictures.model import load

BEAM, MAX_LENGTH = 4, Search.max_len_b


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
        state = read_trusted(checkpoint)
        trained_on = str((state["cfg"] or {}).get("task", {}).get("data") or "").split(":")[0]
        data = Path(trained_on)
        if not trained_on or not any(data.glob("dict*.txt")):
            try:
                data = text_folder(checkpoint, None, trained_on, state)
            except PreparationError as error:
                raise ExportError(str(error)) from None
    model, task = load(checkpoint, data)
    if getattr(task, "source_dictionary", None) is None or not hasattr(model, "encoder"):
        raise ExportError(f"{checkpoint} holds a {type(model).__name__}: no translation model")
    return model, task


def sentences(task: Any, count: int, seed: int = 1) -> tuple[list[Tensor], str]:
    """Return at most `count` source sentences, each ending in eos, and what they are.

    Random ones serve where the data has no validation set.
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


def padded(rows: Sequence[Tensor], pad: int, left: bool) -> Tensor:
    """Lay sentences beside each other: (B, L)."""
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, True, pad, padding_side=side)


@torch.inference_mode()
def translate(model: nn.Module, task: Any, rows: Sequence[Tensor]) -> list[list[str]]:
    """Translate by fairseq's own search: the symbols of each sentence's best hypothesis."""
    words = task.target_dictionary
    search = SequenceGenerator([model], words, beam_size=BEAM, max_len_b=MAX_LENGTH)

    def best_of(part: list[Tensor]) -> list[list[str]]:
        source = padded(part, task.source_dictionary.pad(), left=True)
        lengths = torch.tensor([len(row) for row in part])
        sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
        found = (best[0]["tokens"] for best in search.generate([model], sample))
        return [[words[n] for n in utils.strip_pad(one, words.pad()) if n != words.eos()] for one in found]

    return in_batches(rows, best_of, "translate")


def in_batches(
    rows: Sequence[Any], best_of: Callable[[list[Any]], list[list[str]]], description: str
) -> list[list[str]]:
    """Return the symbols of each sentence's translation, in the sentences' order.

    `best_of` translates some of them, the longest first.
    """
    found: list[list[str]] = [[] for _ in rows]
    with progress(total=len(rows), description=description, unit="sentences") as bar:
        for batch in batches([len(row) for row in rows], Batching(max_sentences=64)):
            for number, symbols in zip(batch, best_of([rows[n] for n in batch]), strict=True):
                found[number] = symbols
            bar.update(len(batch))
    return found
