"""`from_pretrained` of our generating models: raw text, and memory, without arguments."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq import hub_utils, utils
from omegaconf import open_dict
from torch import Tensor

from relpos_fairseq.inference.beside import text_folder, text_folders
from relpos_fairseq.inference.text import read_text
from relpos_fairseq.mends.replacing import replaces
from relpos_fairseq.modules.memory import Memory

Fairseq = hub_utils.GeneratorHubInterface


def speak_text() -> None:
    """Let `from_pretrained` read text/ beside a checkpoint, and give our models this interface."""
    hub_utils.GeneratorHubInterface = TextHub

    @replaces(hub_utils, "from_pretrained")
    def from_pretrained(
        original, model_name_or_path, checkpoint_file="model.pt", data_name_or_path=".", archive_map=None, **kwargs
    ):
        folder = Path(str(model_name_or_path))
        if data_name_or_path == "." and text_folders(folder):
            first = folder / str(checkpoint_file).split(os.pathsep)[0]
            data_name_or_path = str(text_folder(first, None).absolute())
        where = (model_name_or_path, checkpoint_file, data_name_or_path)
        return original(*where, archive_map, **kwargs)


class TextHub(Fairseq):
    """fairseq's interface; of our models it takes and gives plain text.

    `encode` and `decode` go by the data's manifest, unless a tokenizer or BPE is given; `generate`
    takes the memory of a text that was read before.
    """

    def __init__(self, cfg: Any, task: Any, models: Any) -> None:
        super().__init__(cfg, task, models)
        self.source = self.target = None
        ours = all(type(model).__module__.startswith("relpos_fairseq.") for model in models)
        paths = utils.split_paths(getattr(cfg.task, "data", None) or "")
        if ours and paths and self.bpe is None and self.tokenizer is None:
            languages = (getattr(cfg.task, f"{side}_lang", None) for side in ("source", "target"))
            self.source, self.target = (read_text(Path(paths[0]), name) for name in languages)

    def encode(self, sentence: str) -> Tensor:
        """(T,) ids of a text and </s>."""
        if self.source is None:
            return super().encode(sentence)
        symbols = self.source.encode(sentence)
        return torch.tensor([*map(self.src_dict.index, symbols), self.src_dict.eos()])

    def decode(self, tokens: Tensor) -> str:
        """The text of (T,) ids; one </s> at the end is no part of it."""
        if self.target is None:
            return super().decode(tokens)
        never = (self.tgt_dict.pad(), self.tgt_dict.bos())
        ids = [number for number in tokens.tolist() if number not in never]
        ids = ids[: -1 if ids[-1:] == [self.tgt_dict.eos()] else None]
        return self.target.decode([self.tgt_dict[number] for number in ids])

    @torch.no_grad()
    def read(self, text: str, memory: Memory | None = None) -> Memory:
        """Return the memory of a model with memory after a text.

        Args:
            text: of any length; what is generated with the memory begins on a new line.
            memory: of what stands before it.

        Raises:
            ValueError: the model has no memory.
        """
        decoder = self._decoder()
        tokens = self.encode(text.removesuffix("\n")).roll(1).to(self.device)  # </s> begins a line
        for part in tokens[None].split(max(1, self.cfg.task.tokens_per_sample), dim=1):
            memory = decoder.extract_features(part, None, memory=memory)[1]["memory"]
        return memory

    def generate(self, tokenized_sentences, beam: int = 5, *args, memory=None, **kwargs):
        """As fairseq's.

        Args:
            tokenized_sentences: (T,) ids each, as `encode` gives them.
            beam: width of the search.
            args: fairseq's.
            memory: of the text before every sentence (one row), or before each (a row each).
            kwargs: fairseq's, and options of generation.
        """
        if memory is None:
            return super().generate(tokenized_sentences, beam, *args, **kwargs)
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            return self.generate([tokenized_sentences], beam, *args, memory=memory, **kwargs)[0]
        if memory.batch not in (1, len(tokenized_sentences)):
            raise ValueError(
                f"memory has {memory.batch} rows, and there are {len(tokenized_sentences)} "
                f"sentences: give one row for all of them, or a row each"
            )
        generation = copy.deepcopy(self.cfg.generation)
        with open_dict(generation):
            generation.update({"beam": beam, **kwargs})
        generator = self.task.build_generator(self.models, generation)
        found = []
        for number, tokens in enumerate(tokenized_sentences):
            row = torch.full((beam,), number if memory.batch > 1 else 0, device=self.device)
            [sample] = self._build_batches([tokens], False)
            sample = utils.apply_to_sample(lambda tensor: tensor.to(self.device), sample)
            with remembering(self._decoder(), memory.reorder(row)):
                found += self.task.inference_step(generator, self.models, sample)
        return found

    def _decoder(self) -> Any:
        """The one decoder.

        Raises:
            ValueError: it has no memory, or there are several.
        """
        if len(self.models) > 1 or not hasattr(self.models[0], "mem_len"):
            raise ValueError("memory needs one model of --arch relpos_transformer_xl")
        return self.models[0].decoder


@contextlib.contextmanager
def remembering(decoder: Any, memory: Memory) -> Iterator[None]:
    """Let a decoder begin with a memory whenever it is given none."""
    decoder.forward = functools.partial(decoder.forward, memory=memory)
    try:
        yield
    finally:
        del decoder.forward
