"""RoBERTa's encoder: fairseq's, with a position scheme and segments; and its span head."""

from __future__ import annotations

import logging
from typing import Any

from fairseq.models.roberta.model import RobertaEncoder
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from relpos_fairseq.config import resolve
from relpos_fairseq.models.config.roberta import transformer
from relpos_fairseq.models.encoder import RelPosEncoder, encoder_shape
from relpos_fairseq.placement import Placement

logger = logging.getLogger(__name__)


class RelPosSentenceEncoder(RelPosEncoder):
    """Transformer encoder whose positions and segments are those of masked language models."""

    @staticmethod
    def make_positions(cfg: Any) -> Placement:
        return Placement(resolve(cfg, encoder_shape(cfg, "--max-positions"), "masked_lm"))

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """As fairseq's, for (B, T) tokens padded on either side, and (B, T) segment numbers.

        Segments are None where the task divides nothing: one segment, as a single sentence is.
        """
        if self.positions.plan.segment_encoding == "none":
            segments = None
        elif segments is None:
            self._say_undivided()
            segments = src_tokens.new_zeros(src_tokens.shape)
        return self.forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings, segments)

    _said = False

    def _say_undivided(self) -> None:
        """Once a model: the task has no segments, though the model could tell them apart."""
        if not self._said:
            logger.warning(
                "--segment-encoding %s: the task supplies no segments, so every token is in segment 0",
                self.positions.plan.segment_encoding,
            )
        self._said = True


class RelPosRobertaEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder around a `RelPosSentenceEncoder`."""

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> RelPosSentenceEncoder:
        """The layers, initialised as BERT's."""
        encoder = RelPosSentenceEncoder(transformer(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        masked_tokens: Tensor | None = None,
        segments: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict]:
        """Logits (B, T, V), or of the masked tokens (N, V), or features (B, T, E).

        Args:
            src_tokens: (B, T) token ids.
            features_only: leave out the LM head.
            return_all_hiddens: return every layer's output (T, B, E) as `inner_states`.
            masked_tokens: (B, T) True where logits are wanted, or None for everywhere.
            segments: (B, T) segment numbers or None.
            unused: what tasks put into net_input for other models.
        """
        x, extra = self.extract_features(src_tokens, return_all_hiddens=return_all_hiddens, segments=segments)
        if not features_only:
            x = self.output_layer(x, masked_tokens=masked_tokens)
        return x, extra

    def extract_features(
        self, src_tokens: Tensor, return_all_hiddens: bool = False, **kwargs: Any
    ) -> tuple[Tensor, dict]:
        """Features (B, T, E); takes `segments` and `token_embeddings`."""
        out = self.sentence_encoder(
            src_tokens,
            return_all_hiddens=return_all_hiddens,
            token_embeddings=kwargs.get("token_embeddings"),
            segments=kwargs.get("segments"),
        )
        inner_states = out["encoder_states"] if return_all_hiddens else None
        return out["encoder_out"][0].transpose(0, 1), {"inner_states": inner_states}

    def max_positions(self) -> int:
        return self.sentence_encoder.max_positions()


class SpanHead(nn.Module):
    """Start and end logits of every token, for question answering.

    Devlin et al. 2018, BERT (arXiv:1810.04805), section 4.2: two vectors S and E, and a token's
    logits are their products with its last hidden state (here the rows of one projection, with
    biases, as in BERT's released code).

    Args:
        embed_dim: width E of the features.
        dropout: of the features.
    """

    def __init__(self, embed_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, 2)

    def forward(self, features: Tensor) -> Tensor:
        """(B, T, E) to (B, T, 2): start and end logits."""
        return self.out_proj(self.dropout(features))
