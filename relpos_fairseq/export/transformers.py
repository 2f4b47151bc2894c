"""Models of any position scheme as classes of Hugging Face's transformers, which its Auto classes load.

Importing this file registers the classes with the Auto classes; the code of an exported folder does so by itself, so
that `trust_remote_code=True` is enough where this package is installed.

Models that generate keep fairseq's incremental state in a `DecodingCache`, whose rows generate() selects as it does
beams. `relpos export transformers` sets generation_config.json to fairseq's search: </s> begins a sentence, <pad> is
never chosen, and a hypothesis has at least one symbol. A model with memory has it in its cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from relpos_fairseq.conversion.exported import ROBERTA_PREFIX, TIED
from relpos_fairseq.export.model_adapters import scores_of
from relpos_fairseq.export.transformers_text import CODE, RelPosTokenizer
from relpos_fairseq.heads import HEAD, SPAN_HEAD, TOKEN_HEAD, class_loss, loss_of
from relpos_fairseq.models.building import EMBEDDING, build_generating, namespace, shared_names, task_of
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.modules.memory import Memory

PAD, EOS = 1, 2


class OwnCode:
    """Base class: a saved folder imports the class from this package instead of copying its file."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str | None = None) -> None:
        """Do nothing: `RelPosConfig.save_pretrained` writes the code, since releases differ in what they copy."""


class Tied(OwnCode):
    """Base class of models whose parameters are tied when they are built; `shared` maps names to first names."""

    shared: dict[str, str]

    def tie_weights(self, *given, **how) -> None:
        """Tie parameters again, since loading may have replaced them by separate tensors."""
        super().tie_weights(*given, **how)
        for name, source in getattr(self, "shared", {}).items():
            module, _, part = name.rpartition(".")
            setattr(self.get_submodule(module), part, self.get_parameter(source))


class RelPosConfig(OwnCode, PretrainedConfig):
    """Config of a relpos model, by the names of its fairseq config.

    Args:
        values: values of the fairseq config.
        vocab_size: rows of the embedding.
        task: options of the task that it was trained on in fairseq.
        rest: options of transformers.
    """

    model_type = "relpos_roberta"
    models: ClassVar[dict[str, type]] = {}  # by Auto class; `register` fills it in

    def __init__(self, values: dict | None = None, vocab_size: int = 5, task: dict | None = None, **rest) -> None:
        self.values, self.task = dict(values or {}), dict(task or {})
        self.hidden_size = self.values.get("encoder_embed_dim")
        self.num_hidden_layers = self.values.get("encoder_layers")
        self.num_attention_heads = self.values.get("encoder_attention_heads")
        for name, number in (("pad", PAD), ("bos", 0), ("eos", 2)):
            rest.setdefault(f"{name}_token_id", number)
        super().__init__(**{"tie_word_embeddings": True, **rest})
        self.vocab_size = vocab_size

    def save_pretrained(self, save_directory: str | Path, *given, **how) -> None:
        """Save config.json, and the module that the Auto classes import; models save theirs by this method."""
        classes = {"AutoConfig": type(self), **self.models}
        self.auto_map = {n: f"{CODE}.{c.__name__}" for n, c in classes.items()}
        used = {*classes.values(), RelPosTokenizer}
        lines = sorted(f"from {c.__module__} import {c.__name__}  # noqa: F401\n" for c in used)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{CODE}.py").write_text("".join(lines), encoding="utf-8")
        super().save_pretrained(save_directory, *given, **how)


class RelPosPreTrained(Tied, PreTrainedModel):
    """Base class of RoBERTa with and without heads: a RelPosRobertaModel named `roberta`."""

    config_class = RelPosConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    is_new = int(transformers.__version__.split(".")[0]) >= 5
    _keys_to_ignore_on_load_missing = [r"sentence_encoder\.version$"]
    _keys_to_ignore_on_load_unexpected = [r"^roberta\.(classification|span|token)_heads\."]
    _tied_weights_keys = {ROBERTA_PREFIX + TIED: ROBERTA_PREFIX + EMBEDDING} if is_new else [ROBERTA_PREFIX + TIED]

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        task = task_of(config.vocab_size, int(config.values["max_positions"]))
        with torch.device("cpu"):
            self.roberta = RelPosRobertaModel.build_model(namespace(config.values), task)
            self.add_head(config)
        shared = {name: source for name, source in shared_names(self).items() if name != ROBERTA_PREFIX + TIED}
        self.shared = shared
        if shared:  # tables that layers share
            own = self._tied_weights_keys
            self._tied_weights_keys = own | shared if self.is_new else [*own, *shared]
            self._keys_to_ignore_on_load_missing = [*self._keys_to_ignore_on_load_missing, *map(re.escape, shared)]
        self.post_init()

    def add_head(self, config: RelPosConfig) -> None:
        """Register the head of the class, if it has one."""

    def get_input_embeddings(self) -> nn.Module:
        return self.roberta.encoder.sentence_encoder.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the LM head, whose weight is the embedding's."""
        return self.roberta.encoder.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise new heads as BERT does; the model itself is initialised when it is built."""
        heads = (self.roberta.classification_heads, self.roberta.span_heads, self.roberta.token_heads)
        if isinstance(module, nn.Linear) and any(module is m for h in heads for m in h.modules()):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def run(self, input_ids: Tensor, mask: Tensor | None, segments: Tensor | None, **how) -> Tensor:
        """Run the model on tokens (B, L), those where the mask is 0 being padding."""
        if mask is not None:
            input_ids = input_ids.masked_fill(mask == 0, PAD)
        return self.roberta(input_ids, segments=segments, **how)[0]


class RelPosModel(RelPosPreTrained):
    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **unused):
        found = self.run(input_ids, attention_mask, token_type_ids, features_only=True)
        return BaseModelOutput(last_hidden_state=found)


class RelPosForMaskedLM(RelPosPreTrained):
    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **unused):
        """Return logits (B, L, V), and the loss of labels (B, L) other than -100."""
        logits, loss = self.run(input_ids, attention_mask, token_type_ids), None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)


class RelPosForSequenceClassification(RelPosPreTrained):
    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_classification_head(HEAD, num_classes=config.num_labels)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **unused):
        """Return logits (B, classes), and the loss of labels, by the config's problem_type (`heads.loss_of`)."""
        how = {"features_only": True, "classification_head_name": HEAD}
        logits, loss = self.run(input_ids, attention_mask, token_type_ids, **how), None
        if labels is not None:
            loss = loss_of(self.config.problem_type, logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class RelPosForQuestionAnswering(RelPosPreTrained):
    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_question_answering_head(SPAN_HEAD)

    def forward(
        self, input_ids, attention_mask=None, token_type_ids=None, start_positions=None, end_positions=None, **unused
    ):
        """Return start and end logits (B, L), and the loss of positions (B,)."""
        logits = self.run(input_ids, attention_mask, token_type_ids, span_head_name=SPAN_HEAD)
        start, end = logits.float().unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            entropy = nn.functional.cross_entropy
            loss = (entropy(start, start_positions) + entropy(end, end_positions)) / 2
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)


class RelPosForTokenClassification(RelPosPreTrained):
    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_token_classification_head(TOKEN_HEAD, num_classes=config.num_labels)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **unused):
        """Return logits (B, L, classes), and the loss of labels (B, L) other than -100."""
        logits = self.run(input_ids, attention_mask, token_type_ids, token_head_name=TOKEN_HEAD)
        loss = None if labels is None else class_loss(logits, labels)
        return TokenClassifierOutput(loss=loss, logits=logits)


class RelPosForMultipleChoice(RelPosPreTrained):
    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_classification_head(HEAD, num_classes=1)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **unused):
        """Return logits (B, choices) of choices (B, choices, L), and the loss of labels (B,)."""
        given = (input_ids, attention_mask, token_type_ids)
        rows = (None if part is None else part.flatten(0, 1) for part in given)
        logits = self.run(*rows, classification_head_name=HEAD).view(input_ids.shape[:2])
        loss = None if labels is None else class_loss(logits, labels)
        return MultipleChoiceModelOutput(loss=loss, logits=logits)


AUTO = {
    "AutoModel": RelPosModel,
    "AutoModelForMaskedLM": RelPosForMaskedLM,
    "AutoModelForSequenceClassification": RelPosForSequenceClassification,
    "AutoModelForQuestionAnswering": RelPosForQuestionAnswering,
    "AutoModelForTokenClassification": RelPosForTokenClassification,
    "AutoModelForMultipleChoice": RelPosForMultipleChoice,
}


def register(config: type[RelPosConfig], models: dict[str, type]) -> None:
    """Register a configuration, its models and its tokenizer with the Auto classes."""
    config.models = models
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for name, model in models.items():
        getattr(transformers, name).register(config, model, exist_ok=True)
    transformers.AutoTokenizer.register(config, slow_tokenizer_class=RelPosTokenizer, exist_ok=True)


register(RelPosConfig, AUTO)


class RelPosTranslationConfig(RelPosConfig):
    """Config of a translation model: `vocab_size` counts the output's symbols, `source_rows` the input's."""

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
    """The cache of generate(): fairseq's incremental state.

    Args:
        decoder: the decoder.
        state: its incremental state.
        length: number of tokens so far.
    """

    decoder: nn.Module
    state: dict = field(default_factory=dict)
    length: int = 0
    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, as a search selects hypotheses."""
        self.decoder.reorder_incremental_state_scripting(self.state, beam_idx)


class _Generating(Tied, PreTrainedModel, transformers.GenerationMixin):
    """Base class of models that generate: a model of GENERATING_KINDS named `model`."""

    our_kind: str
    base_model_prefix = ""
    _supports_cache_class = False  # no Cache of transformers' own is made
    is_new = int(transformers.__version__.split(".")[0]) >= 5

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        with torch.device("cpu"):
            rows = (getattr(config, "source_rows", config.vocab_size), config.vocab_size)
            self.model = build_generating(self.our_kind, config.values, rows)
        self.shared = shared = shared_names(self)
        self._tied_weights_keys = shared if self.is_new else list(shared)
        self._keys_to_ignore_on_load_missing = [r"\.version$", *shared]
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the model is initialised when it is built."""

    def get_output_embeddings(self) -> None:
        """Return None: tied parameters are tied when the model is built."""

    def decode(
        self, tokens: Tensor, source: dict | None, cache: DecodingCache | None, use_cache: bool
    ) -> tuple[Tensor, DecodingCache | None]:
        """Return scores after all tokens (B, T, V), or with a cache after the last token alone."""
        decoder = self.model.decoder
        if not use_cache:
            return scores_of(decoder, decoder(tokens, source)[0]), None
        cache = cache or DecodingCache(decoder)
        for end in range(cache.length + 1, tokens.size(1) + 1):  # a token at a time
            output = decoder(tokens[:, :end], source, incremental_state=cache.state)[0]
        cache.length = tokens.size(1)
        return scores_of(decoder, output), cache

    def loss_of(self, scores: Tensor, labels: Tensor | None) -> Tensor | None:
        """Return the cross-entropy of labels (B, T) other than -100.

        Raises:
            ValueError: an adaptive softmax, whose scores have no gradient.
        """
        if labels is None:
            return None
        if self.model.decoder.adaptive_softmax is not None:
            raise ValueError("labels: an adaptive softmax is trained by fairseq-train alone")
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


class _Encoder:
    """Adapt an encoder to generate(): padding by attention_mask, output (B, S, E)."""

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
        """Return the labels shifted right, after </s>."""
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
        """Return logits (B, T, V), and the loss of labels (B, T) other than -100."""
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
        """Pass the whole prefix; fairseq's decoder slices off what is cached."""
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
        """Return logits (B, T, V), and the loss of each next label (B, T)."""
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


class RelPosMemoryConfig(RelPosLanguageConfig):
    model_type = "relpos_memory_language_model"
    __init__ = RelPosLanguageConfig.__init__


@dataclass
class MemoryCache(DecodingCache):
    """The cache of a decoder with memory: the memory before a segment, and the segment's tokens.

    Args:
        memory: memory of the earlier segments; None: there are none.
        start: number of tokens before the segment.
    """

    memory: Memory | None = None
    start: int = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.memory is not None:
            self.memory = self.memory.reorder(beam_idx)

    def advance(self, tokens: Tensor, end: int) -> None:
        """Read the segment up to `end` as a whole, and move it into memory."""
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
        """Return scores after all tokens (B, T, V), or with a cache after the current segment's newest.

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
