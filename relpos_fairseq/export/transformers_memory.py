"""Language models with memory in transformers: memory is part of generate()'s cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.export.graphs import scores_of
from relpos_fairseq.export.transformers import PAD, register
from relpos_fairseq.export.transformers_generation import EOS, DecodingCache, RelPosForCausalLM, RelPosLanguageConfig
from relpos_fairseq.modules.memory import Memory


class RelPosMemoryConfig(RelPosLanguageConfig):
    model_type = "relpos_memory_language_model"


@dataclass
class MemoryCache(DecodingCache):
    """What a decoder with memory keeps: the memory before a segment, and the segment's tokens.

    Args:
        memory: what earlier segments left; None: nothing.
        start: tokens before the segment.
    """

    memory: Memory | None = None
    start: int = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.memory is not None:
            self.memory = self.memory.reorder(beam_idx)

    def advance(self, tokens: Tensor, end: int) -> None:
        """Leave the segment up to `end`, which is read as a whole, to memory."""
        segment = tokens[:, self.start : end]
        self.memory = self.decoder(segment, memory=self.memory)[1]["memory"]
        self.start, self.state = end, {}


class RelPosWithMemoryForCausalLM(RelPosForCausalLM):
    """A language model with memory: segments of the trained length, each after those before."""

    config_class = RelPosMemoryConfig
    our_kind = "segment_language_modeling"

    def decode(
        self, tokens: Tensor, source: None, cache: MemoryCache | None, use_cache: bool
    ) -> tuple[Tensor, MemoryCache | None]:
        """Scores after all tokens (B, T, V), or after the newest alone where a cache is kept.

        Raises:
            ValueError: prompts with padding after their tokens.
        """
        decoder, segment = self.model.decoder, int(self.config.values["tokens_per_sample"])
        if not use_cache:
            memory, outputs = None, []
            for part in tokens.split(segment, dim=1):
                output, extra = decoder(part, memory=memory)
                memory = extra["memory"]
                outputs.append(output)
            return scores_of(decoder, torch.cat(outputs, dim=1)), None
        ended = tokens.eq(PAD).long().flip(1).cumprod(1).flip(1).bool()
        if cache is None and ended.any():
            raise ValueError(
                f"input_ids: {int(ended.any(1).sum())} of {len(tokens)} prompts have padding after "
                f"their tokens, where generation begins: pad on the left"
            )
        tokens = tokens.masked_fill(ended, EOS)  # generate() no longer reads rows that ended
        cache = cache or MemoryCache(decoder)
        while tokens.size(1) > cache.start + segment:
            cache.advance(tokens, cache.start + segment)
        cache.length = tokens.size(1)
        output = decoder(tokens[:, cache.start :], incremental_state=cache.state, memory=cache.memory)[0]
        return scores_of(decoder, output), cache


register(RelPosMemoryConfig, {"AutoModelForCausalLM": RelPosWithMemoryForCausalLM})
