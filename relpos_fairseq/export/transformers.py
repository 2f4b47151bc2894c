"""Models of any position scheme as classes of Hugging Face's transformers, which its Auto classes load.

Importing this file registers the classes with the Auto classes; the code of an exported folder does so by itself, so
that `trust_remote_code=True` is enough where this package is installed.

Models that generate keep fairseq's incremental state in a `DecodingCache`, whose rows generate() selects as it does
beams. `relpos export transformers` sets generation_config.json to fairseq's search: </s> begins a sentence, <pad> is
never chosen, and a hypothesis has at least one symbol. A model with memory has it in its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
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
from transformers.utils import ModelOutput

from relpos_fairseq.export.model_adapters import scores_of
from relpos_fairseq.export.recording import all_layers, embedded, limited, recording
from relpos_fairseq.export.transformers_text import CODE, RelPosTokenizer
from relpos_fairseq.heads import HEAD, SPAN_HEAD, TOKEN_HEAD, class_loss, loss_of
from relpos_fairseq.models.building import build_generating, namespace, shared_names, task_of
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.modules.memory import Memory

PAD, EOS, UNK = 1, 2, 3


class OwnCode:
    """Base class: a saved folder imports the class from this package instead of copying its file."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str | None = None) -> None:
        """Do nothing: `RelPosConfig.save_pretrained` writes the code, since releases differ in what they copy."""


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
        for side in ("encoder", "decoder"):  # of a translation model the decoder's
            if f"{side}_layers" in self.values:
                self.hidden_size = self.values[f"{side}_embed_dim"]
                self.num_hidden_layers = self.values[f"{side}_layers"]
                self.num_attention_heads = self.values[f"{side}_attention_heads"]
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


class Common(OwnCode, PreTrainedModel):
    """Base class of all models: what transformers asks of its own, of parameters that are tied when they are built.

    `shared` maps names of tied parameters to first names.
    """

    shared: dict[str, str]
    supports_gradient_checkpointing = True
    base_model_prefix = ""
    main_input_name = "input_ids"
    is_new = int(transformers.__version__.split(".")[0]) >= 5

    def built(self) -> None:
        """Let transformers know which parameters are tied."""
        self.shared = shared_names(self)
        self._tied_weights_keys = self.shared if self.is_new else list(self.shared)
        self.post_init()

    def stacks(self) -> list[Any]:
        """Return the encoder, the decoder, or both."""
        raise NotImplementedError(f"{type(self).__name__} must define stacks")

    def tie_weights(self, *given, **how) -> None:
        """Tie parameters again, since loading may have replaced them by separate tensors."""
        if self.is_new:  # an earlier release would tie the output to the encoder's embedding
            super().tie_weights(*given, **how)
        for name, source in getattr(self, "shared", {}).items():
            module, _, part = name.rpartition(".")
            setattr(self.get_submodule(module), part, self.get_parameter(source))

    def get_input_embeddings(self) -> nn.Module:
        return self.stacks()[0].embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        before = self.get_input_embeddings()
        for stack in self.stacks():
            if stack.embed_tokens is before:
                stack.embed_tokens = value

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise rows that a vocabulary gains as BERT does; the model is initialised when it is built."""
        if isinstance(module, nn.Embedding) and all(module is not part for part in self.modules()):
            nn.init.normal_(module.weight, std=0.02)

    def _set_gradient_checkpointing(self, enable: bool = True, *unused, every_n_layers: int = 1, **without) -> None:
        """Recompute layers in the backward pass, by torch's non-reentrant way whatever is asked for."""
        self.gradient_checkpointing = enable
        for stack in self.stacks():
            for number, layer in enumerate(all_layers(stack)):
                layer.checkpoint_activations = enable and number % every_n_layers == 0

    def asked(self, attentions: bool | None, hidden: bool | None) -> dict[str, bool]:
        """Return what `recording` keeps: as arguments say, and else the config."""
        config = self.config
        return {
            "attentions": config.output_attentions if attentions is None else attentions,
            "hidden": config.output_hidden_states if hidden is None else hidden,
        }

    def given(self, output: ModelOutput, return_dict: bool | None) -> ModelOutput | tuple:
        """Return an output, as a tuple where it is asked for."""
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


def tokens_of(input_ids: Tensor | None, mask: Tensor | None, embeds: Tensor | None) -> Tensor:
    """Return tokens (B, L), those where the mask (B, L) is 0 being padding, and those of embeddings unknown words.

    Raises:
        ValueError: tokens and embeddings, neither, or a mask of another shape, as of transformers.
    """
    if input_ids is not None and embeds is not None:
        raise ValueError("You cannot specify both input_ids and inputs_embeds at the same time")
    if input_ids is None and embeds is None:
        raise ValueError("You have to specify either input_ids or inputs_embeds")
    if embeds is not None:
        input_ids = torch.full(embeds.shape[:2], UNK, device=embeds.device)
    tokens = cast(Tensor, input_ids)
    if mask is None:
        return tokens
    if mask.shape != tokens.shape:
        shapes = f"input_ids (shape {tokens.shape}) or attention_mask (shape {mask.shape})"
        raise ValueError(f"Wrong shape for {shapes}: give one value a token")
    return tokens.masked_fill(mask == 0, PAD)


class RelPosPreTrained(Common):
    """Base class of RoBERTa with and without heads: a RelPosRobertaModel named `roberta`.

    A class says which of its heads is run, what its output is, and its loss.
    """

    config_class = RelPosConfig
    roberta: Any
    chosen: ClassVar[dict[str, Any]] = {}
    output: ClassVar[type[ModelOutput]]
    _keys_to_ignore_on_load_missing = ["roberta.encoder.sentence_encoder.version"]
    _keys_to_ignore_on_load_unexpected = [r"^roberta\.(classification|span|token)_heads\."]

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        task = task_of(config.vocab_size, int(config.values["max_positions"]))
        tied = {} if config.tie_word_embeddings else {"untie_weights_roberta": True}
        with torch.device("cpu"):
            self.roberta = RelPosRobertaModel.build_model(namespace(config.values | tied), task)
            self.add_head(config)
        self.built()

    def add_head(self, config: RelPosConfig) -> None:
        """Register the head of the class, if it has one."""

    def stacks(self) -> list[Any]:
        return [self.roberta.encoder.sentence_encoder]

    def get_output_embeddings(self) -> nn.Linear:
        """Return the LM head's projection, which holds its parameters."""
        head = self.roberta.encoder.lm_head
        with torch.device("meta"):
            found = nn.Linear(*reversed(head.weight.shape))
        found.weight, found.bias = head.weight, head.bias
        return found

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.roberta.encoder.lm_head.weight, self.roberta.encoder.lm_head.bias = value.weight, value.bias

    def resize_token_embeddings(self, *given, **how) -> nn.Module:
        """Resize as transformers does, and the LM head's bias by zeros."""
        found = super().resize_token_embeddings(*given, **how)
        bias = self.roberta.encoder.lm_head.bias
        more = len(found.weight) - len(bias)
        bias.data = nn.functional.pad(bias.data, (0, more))
        return found

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise new heads as BERT does."""
        super()._init_weights(module)
        heads = (self.roberta.classification_heads, self.roberta.span_heads, self.roberta.token_heads)
        if module is self.roberta.encoder.lm_head and module.weight is not self.get_input_embeddings().weight:
            nn.init.normal_(module.weight, std=0.02)  # untied, and not in the folder
        if isinstance(module, nn.Linear) and any(module is m for h in heads for m in h.modules()):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def run(
        self, input_ids: Tensor | None, mask: Tensor | None, segments: Tensor | None, embeds: Tensor | None, **asked
    ) -> tuple[Tensor, dict[str, tuple[Tensor, ...] | None]]:
        """Run the model on tokens (B, L), those where the mask is 0 being padding; a mask (B, L, L) is of pairs."""
        [stack] = self.stacks()
        pairs = mask if mask is not None and mask.dim() == 3 else None
        tokens = tokens_of(input_ids, mask if pairs is None else None, embeds)
        if pairs is not None and pairs.shape != (*tokens.shape, tokens.size(1)):
            tokens_of(tokens, pairs, None)
        with recording(stack, **asked) as found, embedded(stack.embed_tokens, embeds), limited(stack, pairs):
            outputs = self.roberta(tokens, segments=segments, **self.chosen)[0]
        more = found.outputs(tokens.size(1), tokens.size(1))
        return outputs, more

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        inputs_embeds=None,
        labels=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Return logits, and the loss of labels."""
        asked = self.asked(output_attentions, output_hidden_states)
        logits, more = self.run(input_ids, attention_mask, token_type_ids, inputs_embeds, **asked)
        loss = None if labels is None else self.loss_of(logits, labels)
        return self.given(self.output(loss=loss, logits=logits, **more), return_dict)

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of labels other than -100."""
        return class_loss(logits, labels)


class RelPosModel(RelPosPreTrained):
    chosen = {"features_only": True}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Return features (B, L, E); there is no pooler and no `pooler_output`, as of DistilBERT."""
        asked = self.asked(output_attentions, output_hidden_states)
        features, more = self.run(input_ids, attention_mask, token_type_ids, inputs_embeds, **asked)
        return self.given(BaseModelOutput(last_hidden_state=features, **more), return_dict)


class RelPosForMaskedLM(RelPosPreTrained):
    """Logits (B, L, V), and the loss of labels (B, L) other than -100."""

    output = MaskedLMOutput


class RelPosForSequenceClassification(RelPosPreTrained):
    """Logits (B, classes), and the loss of labels, by the config's problem_type (`heads.loss_of`)."""

    chosen = {"features_only": True, "classification_head_name": HEAD}
    output = SequenceClassifierOutput

    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_classification_head(HEAD, num_classes=config.num_labels)

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.config.problem_type, logits, labels)


class RelPosForQuestionAnswering(RelPosPreTrained):
    chosen = {"span_head_name": SPAN_HEAD}

    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_question_answering_head(SPAN_HEAD)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        inputs_embeds=None,
        start_positions=None,
        end_positions=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Return start and end logits (B, L), and the loss of positions (B,) or (B, 1), without those beyond L."""
        asked = self.asked(output_attentions, output_hidden_states)
        logits, more = self.run(input_ids, attention_mask, token_type_ids, inputs_embeds, **asked)
        start, end = logits.float().unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            beyond = logits.size(1)
            first, last = (
                nn.functional.cross_entropy(own, places.flatten().clamp(0, beyond), ignore_index=beyond)
                for own, places in ((start, start_positions), (end, end_positions))
            )
            loss = (first + last) / 2
        found = QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end, **more)
        return self.given(found, return_dict)


class RelPosForTokenClassification(RelPosPreTrained):
    """Logits (B, L, classes), and the loss of labels (B, L) other than -100."""

    chosen = {"token_head_name": TOKEN_HEAD}
    output = TokenClassifierOutput

    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_token_classification_head(TOKEN_HEAD, num_classes=config.num_labels)


class RelPosForMultipleChoice(RelPosPreTrained):
    """Logits (B, choices) of choices (B, choices, L), and the loss of labels (B,)."""

    chosen = {"classification_head_name": HEAD}
    output = MultipleChoiceModelOutput

    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_classification_head(HEAD, num_classes=1)

    def run(self, *given: Any, **asked) -> tuple[Tensor, dict[str, tuple[Tensor, ...] | None]]:
        rows = (None if part is None else part.flatten(0, 1) for part in given)
        logits, more = super().run(*rows, **asked)
        tokens, _, _, embeds = given
        return logits.view((tokens if embeds is None else embeds).shape[:2]), more


AUTO = {
    "AutoModel": RelPosModel,
    "AutoModelForPreTraining": RelPosForMaskedLM,  # as of transformers' RoBERTa
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

    def __init__(self, *given, source_rows: int | None = None, use_cache: bool = True, **rest) -> None:
        rest = {"is_encoder_decoder": True, "decoder_start_token_id": EOS} | rest
        super().__init__(*given, **rest)
        self.use_cache = use_cache
        self.source_rows = source_rows or self.vocab_size


class RelPosLanguageConfig(RelPosConfig):
    model_type = "relpos_language_model"

    def __init__(self, *given, use_cache: bool = True, **rest) -> None:
        super().__init__(*given, **rest)
        self.use_cache = use_cache


@dataclass
class DecodingCache:
    """The cache of generate(): fairseq's incremental state.

    Args:
        decoder: the decoder.
        state: its incremental state.
        tokens: (B, L) the tokens so far.
        embedded: the number of them that were given as embeddings.
    """

    decoder: Any
    state: dict = field(default_factory=dict)
    tokens: Tensor | None = None
    embedded: int = 0
    is_compileable = False
    is_linear = (True,)  # by layer, for transformers 5: generate() may not cut it

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.tokens is None else self.tokens.size(1)

    def extend(self, tokens: Tensor) -> Tensor:
        """Append new tokens (B, T), and return all."""
        self.tokens = tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        return tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, as a search selects hypotheses."""
        self.decoder.reorder_incremental_state_scripting(self.state, beam_idx)
        self.tokens = None if self.tokens is None else self.tokens.index_select(0, beam_idx)


class _Generating(Common):
    """Base class of models that generate: one of ours, of this registered name, is `model`."""

    our_name: str
    model: Any
    _supports_cache_class = False  # no Cache of transformers' own is made
    _is_stateful = True  # nor is it cut: transformers then refuses contrastive and assisted search

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        with torch.device("cpu"):
            rows = config.vocab_size
            own = rows if config.values.get("share_all_embeddings") else getattr(config, "source_rows", rows)
            self.model = build_generating(self.our_name, config.values, (own, rows))
        self.built()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _get_initial_cache_position(self, *given: Any) -> dict[str, Any]:
        """Count positions, which no model here reads, as without a cache, whose length 4.46 reads off a tuple."""
        kept = {"past_key_values": given[-1].pop("past_key_values")} if "past_key_values" in given[-1] else {}
        found = super()._get_initial_cache_position(*given)  # the same dict, which 5 also reads where it was
        found.update(kept)
        return found

    def stacks(self) -> list[Any]:
        return [getattr(self.model, name) for name in ("encoder", "decoder") if hasattr(self.model, name)]

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output projection; None: an adaptive softmax has none."""
        return self.model.decoder.output_projection

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.output_projection = value

    def resize_token_embeddings(self, *given, **how) -> nn.Module:
        """Resize the one vocabulary as transformers does.

        Raises:
            ValueError: a translation model's input and output have vocabularies of their own.
            NotImplementedError: an adaptive softmax or adaptive embeddings.
        """
        [own, *others] = {id(stack.embed_tokens): stack.embed_tokens for stack in self.stacks()}.values()
        if others:
            raise ValueError("resize_token_embeddings: input and output have embeddings of their own: train another")
        if self.model.decoder.adaptive_softmax is not None or not isinstance(own, nn.Embedding):
            raise NotImplementedError("resize_token_embeddings: an adaptive softmax has bands of fixed sizes")
        found = super().resize_token_embeddings(*given, **how)
        self.model.decoder.output_projection.out_features = len(found.weight)
        if hasattr(self.config, "source_rows"):
            self.config.source_rows = len(found.weight)
        return found

    def decode(
        self,
        tokens: Tensor,
        source: dict | None,
        cache: DecodingCache | None,
        use_cache: bool,
        embeds: Tensor | None,
        **asked,
    ) -> tuple[Tensor, DecodingCache | None, dict[str, Any]]:
        """Return scores after the tokens (B, T, V), which come after the cache's, the cache, and what was asked for."""
        decoder, new = self.model.decoder, tokens.size(1)
        if cache is not None or use_cache:
            cache = cache or self.new_cache()
            tokens = cache.extend(tokens)
            cache.embedded += 0 if embeds is None else new
        with recording(decoder, **asked) as found, embedded(decoder.embed_tokens, embeds):
            scores = self.scores(tokens, new, source, cache)
        return scores, cache if use_cache else None, found.outputs(tokens.size(1), new)

    def caches(self, use_cache: bool | None, labels: Tensor | None) -> bool:
        """Tell whether a cache is returned: as the argument says, and else the config, but in training.

        Nor is one unasked where angles depend on the length: its steps have those of the longest input.
        """
        if use_cache is None:
            stretches = any(getattr(module, "scales_by_length", False) for module in self.modules())
            use_cache = self.config.use_cache and not self.training and not stretches
        return labels is None and use_cache

    def new_cache(self) -> DecodingCache:
        return DecodingCache(self.model.decoder)

    def scores(self, tokens: Tensor, new: int, source: dict | None, cache: DecodingCache | None) -> Tensor:
        """Return scores after the last `new` of all tokens (B, new, V)."""
        decoder = self.model.decoder
        state = None if cache is None else cache.state
        return scores_of(decoder, decoder(tokens, source, incremental_state=state)[0])

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


def asked_of(named: dict[str, Any]) -> dict[str, Any]:
    """Return the states that generate() asks for, which transformers 5 passes on here."""
    return {name: named[name] for name in ("output_attentions", "output_hidden_states") if name in named}


def newest(mask: Tensor | None, given: Tensor | None) -> Tensor | None:
    """Return what a mask of all tokens (B, L) says of the newest (B, T, ...), which come after a cache's."""
    return mask if mask is None or given is None else mask[:, -given.size(1) :]


class _Encoder:
    """Adapt an encoder to generate(): padding by attention_mask, output (B, S, E)."""

    main_input_name = "input_ids"

    def __init__(self, model: _Generating) -> None:
        self.model = model

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ) -> BaseModelOutput | tuple:
        [encoder, _] = self.model.stacks()
        tokens = tokens_of(input_ids, attention_mask, inputs_embeds)
        asked = self.model.asked(output_attentions, output_hidden_states)
        with recording(encoder, **asked) as found, embedded(encoder.embed_tokens, inputs_embeds):
            states = encoder(tokens)["encoder_out"][0].transpose(0, 1)
        more = found.outputs(tokens.size(1), tokens.size(1))
        return self.model.given(BaseModelOutput(states, **more), return_dict)

    __call__ = forward


class RelPosForSeq2SeqLM(_Generating, GenerationMixin):
    config_class = RelPosTranslationConfig
    our_name = "relpos_transformer"
    _keys_to_ignore_on_load_missing = ["model.encoder.version", "model.decoder.version"]

    def get_encoder(self, *unused, **without) -> _Encoder:
        return _Encoder(self)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the labels shifted right, after </s>."""
        begun = labels.new_full((len(labels), 1), EOS)
        return torch.cat([begun, labels[:, :-1].masked_fill(labels[:, :-1] == -100, PAD)], dim=1)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        past_key_values=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        cache=None,
    ) -> Seq2SeqLMOutput | tuple:
        """Return logits (B, T, V), and the loss of labels (B, T) other than -100.

        `cache` is `past_key_values` by the name that releases since 5 give it.
        """
        past_key_values = past_key_values or cache
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(
                input_ids, attention_mask, inputs_embeds, output_attentions, output_hidden_states, return_dict=True
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        states = encoder_outputs[0]
        padding = tokens_of(input_ids, attention_mask, states if input_ids is None else None) == PAD
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        begun = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if past_key_values is not None:
            decoder_attention_mask = newest(decoder_attention_mask, begun)
        tokens = tokens_of(decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds)
        source = {"encoder_out": [states.transpose(0, 1)], "encoder_padding_mask": [padding]}
        asked = self.asked(output_attentions, output_hidden_states)
        scores, after, more = self.decode(
            tokens, source, past_key_values, self.caches(use_cache, labels), decoder_inputs_embeds, **asked
        )
        found = Seq2SeqLMOutput(
            loss=self.loss_of(scores, labels),
            logits=scores,
            past_key_values=after,
            decoder_hidden_states=more["hidden_states"],
            decoder_attentions=more["attentions"],
            cross_attentions=more.get("cross_attentions"),
            encoder_last_hidden_state=states,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )
        return self.given(found, return_dict)

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        use_cache=None,
        cache=None,
        **kwargs,  # by this name transformers tells that the encoder's other inputs are taken
    ) -> dict[str, Any]:
        past_key_values = past_key_values or cache
        return asked_of(kwargs) | {
            "decoder_input_ids": input_ids[:, past_key_values.get_seq_length() if past_key_values else 0 :],
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            "use_cache": use_cache is not False,
        }


class RelPosForCausalLM(_Generating, GenerationMixin):
    config_class = RelPosLanguageConfig
    our_name = "relpos_transformer_lm"
    _keys_to_ignore_on_load_missing = ["model.decoder.version"]

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        cache=None,
    ) -> CausalLMOutputWithPast | tuple:
        """Return logits (B, T, V), and the loss of each next label (B, T).

        `cache` is `past_key_values` by the name that releases since 5 give it.
        """
        past_key_values = past_key_values or cache
        given = input_ids if inputs_embeds is None else inputs_embeds
        if past_key_values is not None:
            attention_mask = newest(attention_mask, given)
        tokens = tokens_of(input_ids, attention_mask, inputs_embeds)
        asked = self.asked(output_attentions, output_hidden_states)
        scores, after, more = self.decode(
            tokens, None, past_key_values, self.caches(use_cache, labels), inputs_embeds, **asked
        )
        loss = self.loss_of(scores[:, :-1], None if labels is None else labels[:, 1:])
        return self.given(CausalLMOutputWithPast(loss=loss, logits=scores, past_key_values=after, **more), return_dict)

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        inputs_embeds=None,
        use_cache=None,
        cache=None,
        **more,
    ) -> dict[str, Any]:
        past_key_values = past_key_values or cache
        cached = past_key_values.get_seq_length() if past_key_values else 0
        embeds = None if inputs_embeds is None else inputs_embeds[:, cached:]
        if embeds is not None and not embeds.size(1):  # the prompt is read
            embeds = None
        if cached:  # tokens that were given as embeddings may be among input_ids or not
            without = past_key_values.embedded if input_ids.size(1) <= cached else 0
            input_ids = input_ids[:, cached - without :]
        return asked_of(more) | {
            "input_ids": input_ids if embeds is None else None,
            "inputs_embeds": embeds,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": use_cache is not False,
        }


register(RelPosTranslationConfig, {"AutoModelForSeq2SeqLM": RelPosForSeq2SeqLM})
register(RelPosLanguageConfig, {"AutoModelForCausalLM": RelPosForCausalLM})


class RelPosMemoryConfig(RelPosLanguageConfig):
    model_type = "relpos_memory_language_model"

    __init__ = RelPosLanguageConfig.__init__  # transformers 5 makes one where there is none


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

    def advance(self, tokens: Tensor, end: int) -> Tensor:
        """Read the segment up to `end` as a whole, move it into memory, and return its output (B, T, V)."""
        output, extra = self.decoder(tokens[:, self.start : end], memory=self.memory)
        self.memory, self.start, self.state = extra["memory"], end, {}
        return output


class RelPosWithMemoryForCausalLM(RelPosForCausalLM, GenerationMixin):
    """A language model with memory: segments of the trained length, each after those before."""

    config_class = RelPosMemoryConfig
    our_name = "relpos_transformer_xl"

    def caches(self, use_cache: bool | None, labels: Tensor | None) -> bool:
        """Tell whether a cache is returned: as the argument says, since it takes no padding on the right."""
        return labels is None and bool(use_cache)

    def new_cache(self) -> MemoryCache:
        return MemoryCache(self.model.decoder)

    def decode(self, tokens: Tensor, source: Any, cache: Any, use_cache: bool, embeds, **asked):
        """Return what `_Generating.decode` does.

        Raises:
            ValueError: prompts with padding after their tokens, embeddings with a cache, or states of padded rows.
        """
        if embeds is not None and (use_cache or cache is not None):
            raise ValueError(
                "inputs_embeds: a model with memory reads tokens again: give input_ids, or use_cache=False"
            )
        every = tokens if cache is None else torch.cat([cast(Tensor, cache.tokens), tokens], dim=1)
        moved = (every[:, :-1].eq(PAD) & every[:, 1:].ne(PAD)).any(dim=1)
        if any(asked.values()) and moved.any():
            raise ValueError(
                f"output_attentions and output_hidden_states: {int(moved.sum())} of {len(tokens)} rows have padding "
                f"before tokens, which a model with memory moves: give rows without"
            )
        return super().decode(tokens, source, cache, use_cache, embeds, **asked)

    def scores(self, tokens: Tensor, new: int, source: Any, cache: Any) -> Tensor:
        decoder, segment = self.model.decoder, int(self.config.values["tokens_per_sample"])
        outputs = []
        if cache is None:
            memory = None
            for part in tokens.split(segment, dim=1):
                output, extra = decoder(part, memory=memory)
                memory = extra["memory"]
                outputs.append(output)
            return scores_of(decoder, torch.cat(outputs, dim=1))
        ended = tokens.eq(PAD).long().flip(1).cumprod(1).flip(1).bool()
        if new == tokens.size(1) and ended.any():
            raise ValueError(
                f"input_ids: {int(ended.any(1).sum())} of {len(tokens)} prompts have padding after "
                f"their tokens, where generation begins: pad on the left"
            )
        tokens = tokens.masked_fill(ended, EOS)  # generate() no longer reads rows that ended
        while tokens.size(1) > cache.start + segment:
            outputs.append(cache.advance(tokens, cache.start + segment))
        outputs.append(decoder(tokens[:, cache.start :], incremental_state=cache.state, memory=cache.memory)[0])
        return scores_of(decoder, torch.cat(outputs, dim=1)[:, -new:])


register(RelPosMemoryConfig, {"AutoModelForCausalLM": RelPosWithMemoryForCausalLM})
