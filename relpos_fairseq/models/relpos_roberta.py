"""`relpos_roberta`: fairseq's RoBERTa with any position scheme, segments, and heads of tokens and spans."""

from __future__ import annotations

import logging
from typing import Any

from fairseq.models.roberta.model import RobertaEncoder, RobertaModel
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from relpos_fairseq.core.config import resolve
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.models import roberta_hub
from relpos_fairseq.models.configs import RelPosRobertaConfig, add_flags, namespace, register_sizes, transformer, widths
from relpos_fairseq.models.encoder import RelPosEncoder, encoder_shape
from relpos_fairseq.modules.transformer_layer import initialize_projections
from relpos_fairseq.tasks.sentence_pairs import request_segments

logger = logging.getLogger(__name__)


class RelPosSentenceEncoder(RelPosEncoder):
    """Transformer encoder with the position schemes and segments of a masked language model."""

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
        """Encode (B, T) tokens padded on either side, with (B, T) segment numbers.

        Without segment numbers from the task every token is in segment 0, as in a single sentence.
        """
        if self.positions.plan.segment_encoding == "none":
            segments = None
        elif segments is None:
            self._warn_of_one_segment()
            segments = src_tokens.new_zeros(src_tokens.shape)
        return self.forward_scriptable(src_tokens, src_lengths, return_all_hiddens, token_embeddings, segments)

    _warned = False

    def _warn_of_one_segment(self) -> None:
        """Warn, once for each model, that the task supplies no segments although the model encodes them."""
        if not self._warned:
            logger.warning(
                "--segment-encoding %s: the task supplies no segments, so every token is in segment 0",
                self.positions.plan.segment_encoding,
            )
        self._warned = True


class RelPosRobertaEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder around a `RelPosSentenceEncoder`."""

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: nn.Embedding) -> RelPosSentenceEncoder:
        """Build the layers, initialised as BERT's."""
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
        """Return logits (B, T, V), logits of the masked tokens (N, V), or features (B, T, E).

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
        """Return features (B, T, E); keyword arguments are `segments` and `token_embeddings` of the encoder."""
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


class TokenHead(nn.Module):
    """Projection of every token's features to logits, after dropout.

    Token classification, as transformers' BertForTokenClassification, and with 2 outputs question
    answering (Devlin et al. 2018, BERT, arXiv:1810.04805, section 4.2): two vectors S and E, whose
    products with a token's last hidden state are its start and end logits (here the rows of the
    projection, with biases, as in BERT's released code).

    Args:
        embed_dim: width E of the features.
        outputs: logits of a token.
        dropout: of the features.
    """

    def __init__(self, embed_dim: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(embed_dim, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B, T, outputs) of features (B, T, E)."""
        return self.out_proj(self.dropout(features))


class RelPosRobertaModel(RobertaModel):
    """fairseq's RobertaModel whose self-attention has a position scheme."""

    def __init__(self, args: Any, encoder: RelPosRobertaEncoder) -> None:
        """Initialise weights as BERT does, then apply initial values that schemes need (M4M's projection biases)."""
        super().__init__(args, encoder)
        self.span_heads, self.token_heads = nn.ModuleDict(), nn.ModuleDict()
        sentence_encoder = encoder.sentence_encoder
        initialize_projections(sentence_encoder.positions, sentence_encoder.layers)
        for module in self.modules():
            if hasattr(module, "eps") and hasattr(module, "normalized_shape"):
                module.eps = args.layer_norm_eps  # fairseq builds every layer norm with 1e-5

    add_args = classmethod(add_flags)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> RelPosRobertaModel:
        """Build the model from the flat config.

        Raises:
            ValueError: a position flag that is wrong or does not apply, or a table of positions
                shorter than the task's samples.
        """
        longest = task.max_positions()
        if longest is None:  # multilingual_masked_lm has its samples' length among its flags alone
            longest = getattr(task.args, "tokens_per_sample", 512)
        args = namespace(cfg, longest)
        model = cls(args, RelPosRobertaEncoder(args, task.source_dictionary))
        _check_lengths(model, longest)
        if args.segment_encoding != "none":
            request_segments(task)
        return model

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        span_head_name: str | None = None,
        segments: Tensor | None = None,
        token_head_name: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict]:
        """Return logits or features, as fairseq's RobertaModel does.

        Args:
            src_tokens: (B, T) token ids.
            features_only: leave out the LM head.
            return_all_hiddens: return every layer's output as `inner_states`.
            classification_head_name: return this head's logits (B, classes).
            span_head_name: return this head's start and end logits (B, T, 2).
            segments: (B, T) segment numbers where the task has them.
            token_head_name: return this head's logits (B, T, classes).
            kwargs: `masked_tokens`, and what tasks put into net_input for other models.

        Returns:
            Logits or features, and `{"inner_states": ...}`.

        Raises:
            ValueError: a head that is not registered.
        """
        head = self._head(classification_head_name, span_head_name, token_head_name)
        features_only = features_only or head is not None
        x, extra = self.encoder(src_tokens, features_only, return_all_hiddens, segments=segments, **kwargs)
        return (x if head is None else head(x)), extra

    def _head(self, *names: str | None) -> nn.Module | None:
        """Return the head that one of the names of a classification, a span and a token head chooses; None: none."""
        named = tuple(zip((self.classification_heads, self.span_heads, self.token_heads), names, strict=True))
        for heads, name in named:
            if name is not None and name not in heads:
                known = ", ".join(heads) or "none"
                raise ValueError(f"no head {name!r} is registered; there are: {known}")
        chosen = [heads[name] for heads, name in named if name is not None]
        if len(chosen) > 1:
            raise ValueError(f"one head at a time, got {' and '.join(repr(name) for name in names if name)}")
        return chosen[0] if chosen else None

    def register_question_answering_head(self, name: str) -> None:
        """Register a span head, which `forward(span_head_name=name)` chooses."""
        self._register("span", name, 2)

    def register_token_classification_head(self, name: str, num_classes: int) -> None:
        """Register a token head, which `forward(token_head_name=name)` chooses."""
        self._register("token", name, num_classes)

    def _register(self, kind: str, name: str, outputs: int) -> None:
        heads = getattr(self, f"{kind}_heads")
        if name in heads:
            logger.warning("registering %s head %r again: its weights start afresh", kind, name)
        heads[name] = TokenHead(self.args.encoder_embed_dim, outputs, self.args.pooler_dropout)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "model.pt",
        data_name_or_path: str = ".",
        bpe: Any = None,
        **kwargs: Any,
    ) -> roberta_hub.RelPosRobertaHub:
        """Load a checkpoint for use from Python, without a network.

        Args:
            model_name_or_path: folder of the checkpoint.
            checkpoint_file: its name.
            data_name_or_path: folder of dict.txt; one that begins with . is inside the former.
            bpe: a tokenizer of `relpos_fairseq.text` or its folder; None: the one beside
                the data or the checkpoint, and without one text is symbols joined by spaces.
            kwargs: overrides of the checkpoint's config, and `quantization="int8"` or `"bf16"`.
        """
        return roberta_hub.from_pretrained(
            str(model_name_or_path), checkpoint_file, str(data_name_or_path), bpe, **kwargs
        )

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Add or remove heads of a checkpoint, as fairseq does, span and token heads included.

        Heads of the checkpoint that the model lacks are registered with --load-checkpoint-heads
        and else left out, as are those of another size; heads of the model that the checkpoint
        lacks keep their own weights. A state without fairseq's number of a version is none of its first releases, whose
        layers have no layer norm after the last.
        """
        stack = f"{name}.encoder.sentence_encoder" if name else "encoder.sentence_encoder"
        state_dict.setdefault(f"{stack}.version", self.encoder.sentence_encoder.version)
        super().upgrade_state_dict_named(state_dict, name)
        for kind in ("span", "token"):
            heads, prefix = getattr(self, f"{kind}_heads"), f"{name}.{kind}_heads." if name else f"{kind}_heads."
            saved = dict.fromkeys(key[len(prefix) :].split(".")[0] for key in state_dict if key.startswith(prefix))
            for head in saved:
                outputs = len(state_dict[f"{prefix}{head}.out_proj.weight"])
                if head not in heads and self.args.load_checkpoint_heads:
                    self._register(kind, head, outputs)
                if head in heads and heads[head].out_proj.out_features == outputs:
                    continue
                has = f"one of {heads[head].out_proj.out_features} outputs" if head in heads else "none"
                logger.warning("%s head %r of the checkpoint is left out: the model has %s", kind, head, has)
                for key in [key for key in state_dict if key.startswith(f"{prefix}{head}.")]:
                    del state_dict[key]
            for key, value in heads.state_dict().items():
                state_dict.setdefault(prefix + key, value)


def _check_lengths(model: RelPosRobertaModel, wanted: int) -> None:
    """Raise an error if the table of positions is shorter than the samples of the task."""
    plan = model.encoder.sentence_encoder.positions.plan
    if plan.longest is not None and plan.longest < wanted:
        raise ValueError(
            f"--max-positions {plan.longest} is smaller than the task's samples of up to {wanted} "
            f"tokens (--tokens-per-sample, or the task's --max-positions), and position scheme "
            f"{plan.name} has a table of that many positions: raise it, shorten the samples, or "
            f"choose a relative scheme, which takes any length"
        )


SIZES: dict[str, dict[str, Any]] = {
    "relpos_roberta": {},
    "relpos_roberta_tiny": widths("encoder", 128, 512, 4, 2),
    "relpos_roberta_small": widths("encoder", 512, 2048, 8, 4),
    "relpos_roberta_base": widths("encoder", 768, 3072, 12, 12),
    "relpos_roberta_large": widths("encoder", 1024, 4096, 16, 24),
}


globals().update(register_sizes(RelPosRobertaModel, RelPosRobertaConfig, SIZES, __name__))
