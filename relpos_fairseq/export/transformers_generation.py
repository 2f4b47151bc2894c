"""Translation and language models of any scheme with transformers' `generate()`.

fairseq's decoder reads all tokens so far and keeps what its layers need of them: a `DecodingCache`
is that dictionary, and rows of it are selected as beams are.  `relpos export transformers` sets
generation_config.json to fairseq's search: </s> begins a sentence, <pad> is never chosen, and a
hypothesis has one symbol at least.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from relpos_fairseq.conversion.translation.generating import build, shared_names
from relpos_fairseq.export.graphs import scores_of
from relpos_fairseq.export.transformers import PAD, OwnCode, RelPosConfig, register

EOS = 2


class RelPosTranslationConfig(RelPosConfig):
    """As RelPosConfig; `vocab_size` is the output's, `source_rows` the input's."""

    model_type = "relpos_translation"

    def __init__(self, *given, source_rows: int | None = None, **rest) -> None:
        rest = {"is_encoder_decoder": True, "decoder_start_token_id": EOS} | rest
        super().__init__(*given, **rest)
        self.source_rows = source_rows or self.vocab_size


class RelPosLanguageConfig(RelPosConfig):
    model_type = "relpos_language_model"

    def __init__(self, *given, **rest) -> None:  # transformers 5 makes one where there is none
        super().__init__(*given, **rest)


@dataclass
class DecodingCache:
    """What a decoder keeps of the tokens so far.

    Args:
        decoder: it.
        state: fairseq's incremental state.
        length: of those tokens.
    """

    decoder: nn.Module
    state: dict = field(default_factory=dict)
    length: int = 0
    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, as a search keeps hypotheses."""
        self.decoder.reorder_incremental_state_scripting(self.state, beam_idx)


class _Generating(OwnCode, PreTrainedModel, transformers.GenerationMixin):
    """What both kinds have in common: our model, named `model`, of one of the KINDS."""

    our_kind: str
    base_model_prefix = ""
    _supports_cache_class = False  # no Cache of transformers' own is made
    is_new = int(transformers.__version__.split(".")[0]) >= 5

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        with torch.device("cpu"):
            rows = (getattr(config, "source_rows", config.vocab_size), config.vocab_size)
            self.model = build(self.our_kind, config.values, rows)
        self.shared = shared = shared_names(self)
        self._tied_weights_keys = shared if self.is_new else list(shared)
        self._keys_to_ignore_on_load_missing = [r"\.version$", *shared]
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Leave what the model drew itself."""

    def get_output_embeddings(self) -> None:
        """None: what is shared is shared when the model is built."""

    def tie_weights(self, *given, **how) -> None:
        """Share what is shared anew: loading may have put other tensors in its place."""
        super().tie_weights(*given, **how)
        for name, source in self.shared.items():
            module, _, part = name.rpartition(".")
            setattr(self.get_submodule(module), part, self.get_parameter(source))

    def decode(
        self, tokens: Tensor, source: dict | None, cache: DecodingCache | None, use_cache: bool
    ) -> tuple[Tensor, DecodingCache | None]:
        """Scores after all tokens (B, T, V), or after the last alone where a cache is kept."""
        decoder = self.model.decoder
        if not use_cache:
            return scores_of(decoder, decoder(tokens, source)[0]), None
        cache = cache or DecodingCache(decoder)
        for end in range(cache.length + 1, tokens.size(1) + 1):  # a token at a time
            output = decoder(tokens[:, :end], source, incremental_state=cache.state)[0]
        cache.length = tokens.size(1)
        return scores_of(decoder, output), cache

    def loss_of(self, scores: Tensor, labels: Tensor | None) -> Tensor | None:
        """Cross-entropy of labels (B, T) other than -100.

        Raises:
            ValueError: an adaptive softmax, whose scores have no gradient.
        """
        if labels is None:
            return None
        if self.model.decoder.adaptive_softmax is not None:
            raise ValueError("labels: an adaptive softmax is trained by fairseq-train alone")
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


class _Encoder:
    """An encoder as generate() calls it: padding by attention_mask, output (B, S, E)."""

    main_input_name = "input_ids"

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder

    def forward(self, input_ids, attention_mask=None, **unused) -> BaseModelOutput:
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, PAD)
        return BaseModelOutput(self.encoder(input_ids)["encoder_out"][0].transpose(0, 1))

    __call__ = forward


class RelPosForSeq2SeqLM(_Generating):
    config_class = RelPosTranslationConfig
    our_kind = "translation"
    main_input_name = "input_ids"

    def get_input_embeddings(self) -> nn.Module:
        return self.model.encoder.embed_tokens

    def get_encoder(self, *unused, **without) -> _Encoder:
        return _Encoder(self.model.encoder)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels after </s>, without the last."""
        begun = labels.new_full((len(labels), 1), EOS)
        return torch.cat([begun, labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD)], dim=1)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        encoder_outputs=None,
        past_key_values=None,
        labels=None,
        use_cache=False,
        **unused,
    ) -> Seq2SeqLMOutput:
        """Logits (B, T, V), and the loss of labels (B, T) other than -100."""
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        states = encoder_outputs[0]
        if attention_mask is not None:
            padding = attention_mask == 0
        elif input_ids is not None:
            padding = input_ids == PAD
        else:
            padding = states.new_zeros(states.shape[:2], dtype=torch.bool)
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        source = {"encoder_out": [states.transpose(0, 1)], "encoder_padding_mask": [padding]}
        scores, cache = self.decode(decoder_input_ids, source, past_key_values, use_cache)
        return Seq2SeqLMOutput(
            loss=self.loss_of(scores, labels), logits=scores, past_key_values=cache, encoder_last_hidden_state=states
        )

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, encoder_outputs=None, use_cache=None, **unused
    ) -> dict[str, Any]:
        """All tokens so far: fairseq's decoder takes what it lacks."""
        return {
            "decoder_input_ids": input_ids,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
            "use_cache": use_cache is not False,
        }


class RelPosForCausalLM(_Generating):
    config_class = RelPosLanguageConfig
    our_kind = "language_modeling"
    main_input_name = "input_ids"

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.embed_tokens

    def forward(
        self, input_ids=None, attention_mask=None, past_key_values=None, labels=None, use_cache=False, **unused
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), and the loss of the labels (B, T) that follow each token."""
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, PAD)
        use_cache = use_cache and labels is None
        scores, cache = self.decode(input_ids, None, past_key_values, use_cache)
        loss = self.loss_of(scores[:, :-1], None if labels is None else labels[:, 1:])
        return CausalLMOutputWithPast(loss=loss, logits=scores, past_key_values=cache)

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, use_cache=None, **unused
    ) -> dict[str, Any]:
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": use_cache is not False,
        }


register(RelPosTranslationConfig, {"AutoModelForSeq2SeqLM": RelPosForSeq2SeqLM})
register(RelPosLanguageConfig, {"AutoModelForCausalLM": RelPosForCausalLM})
