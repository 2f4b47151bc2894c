"""`relpos_transformer_xl`: a language model with memory, under any relative position scheme.

Dai et al. 2019, Transformer-XL (arXiv:1901.02860); sizes from the paper's released scripts.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from relpos_fairseq.models.config.sizes import register_sizes, widths
from relpos_fairseq.models.config.transformer_xl import RelPosTransformerXLConfig
from relpos_fairseq.models.relpos_transformer_lm import RelPosLanguageModel
from relpos_fairseq.models.transformer_xl.decoder import RelPosXLDecoder
from relpos_fairseq.modules.memory import Memory, MemoryCarrier

logger = logging.getLogger(__name__)


class RelPosTransformerXLModel(RelPosLanguageModel):
    """A causal language model whose layers attend over [memory, segment]."""

    flags = RelPosTransformerXLConfig
    decoder_class = RelPosXLDecoder

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> RelPosLanguageModel:
        """As every language model's; a task that carries no memory is said."""
        if cfg.mem_len and not getattr(task, "carries_memory", False):
            logger.warning(
                "task %s carries no memory: every sample begins without any, whatever --mem-len "
                "%d says; train and evaluate by --task segment_language_modeling",
                type(task).__name__,
                cfg.mem_len,
            )
        return super().build_model(cfg, task)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        memory: Memory | MemoryCarrier | None = None,
        document_starts: Tensor | None = None,
        incremental_state: dict | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Logits (B, T, V) and {"memory": the new memory}; see `RelPosXLDecoder.forward`."""
        return self.decoder(
            src_tokens, incremental_state=incremental_state, memory=memory, document_starts=document_starts, **unused
        )

    @property
    def mem_len(self) -> int:
        """Slots of memory: --mem-len in training, --eval-mem-len in evaluation, or what was set."""
        return self.decoder.mem_len

    @mem_len.setter
    def mem_len(self, length: int) -> None:
        self.decoder.mem_len = length


def _paper(width: int, ffn: int, heads: int, layers: int, dropout: float) -> dict[str, Any]:
    sizes = widths("decoder", width, ffn, heads, layers)
    return sizes | {"dropout": dropout, "activation_dropout": dropout}


def _adaptive(factor: float) -> dict[str, Any]:
    """WikiText-103's adaptive embedding and softmax, with tied projections."""
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": "20000,40000,200000",
        "adaptive_softmax_cutoff": "20000,40000,200000",
        "adaptive_input_factor": factor,
        "adaptive_softmax_factor": factor,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
    }


SIZES: dict[str, dict[str, Any]] = {
    "relpos_transformer_xl": {},
    "relpos_transformer_xl_tiny": _paper(128, 512, 4, 2, 0.1) | {"mem_len": 64},
    "relpos_transformer_xl_wt103_base": _paper(410, 2100, 10, 16, 0.1) | _adaptive(1.0) | {"mem_len": 150},
    "relpos_transformer_xl_wt103_large": _paper(1024, 4096, 16, 18, 0.2)
    | _adaptive(4.0)
    | {"mem_len": 384, "attention_dropout": 0.2},
    "relpos_transformer_xl_enwik8_base": _paper(512, 2048, 8, 12, 0.1) | {"mem_len": 512},
}

globals().update(register_sizes(RelPosTransformerXLModel, RelPosTransformerXLConfig, SIZES, __name__))
