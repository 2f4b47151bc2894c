"""A RoBERTa of any scheme as a folder that transformers' Auto classes load.

Importing this file makes the Auto classes know the folder; its own code does so by itself, so that
`trust_remote_code=True` is enough where this package is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)

from relpos_fairseq.conversion.huggingface.folder import HEAD, SPAN_HEAD
from relpos_fairseq.conversion.huggingface.relpos import EMBEDDING, PREFIX, TIED
from relpos_fairseq.conversion.writer import namespace, task_of
from relpos_fairseq.export.transformers_text import CODE, RelPosTokenizer
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel

PAD = 1


class OwnCode:
    """A class that a saved folder imports from this package, and never as a copy of its file."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str | None = None) -> None:
        """Leave code to `RelPosConfig.save_pretrained`: releases differ in what they copy."""


class RelPosConfig(OwnCode, PretrainedConfig):
    """Sizes and positions of a model of ours, by the names of its own config.

    Args:
        values: our config's.
        vocab_size: rows of the embedding.
        task: options of the task that it was trained on in fairseq.
        rest: transformers' own.
    """

    model_type = "relpos_roberta"
    models: ClassVar[dict[str, type]] = {}  # of each Auto class; `register` fills it in

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
        """Save, and beside it the code that the Auto classes import; models save theirs by this."""
        classes = {"AutoConfig": type(self), **self.models}
        self.auto_map = {n: f"{CODE}.{c.__name__}" for n, c in classes.items()}
        used = {*classes.values(), RelPosTokenizer}
        lines = sorted(f"from {c.__module__} import {c.__name__}  # noqa: F401\n" for c in used)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / f"{CODE}.py").write_text("".join(lines), encoding="utf-8")
        super().save_pretrained(save_directory, *given, **how)


class RelPosPreTrained(OwnCode, PreTrainedModel):
    """What all heads have in common: our model, named `roberta`."""

    config_class = RelPosConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    is_new = int(transformers.__version__.split(".")[0]) >= 5
    _keys_to_ignore_on_load_missing = [r"sentence_encoder\.version$"]
    _keys_to_ignore_on_load_unexpected = [r"^roberta\.(classification|span)_heads\."]
    _tied_weights_keys = {PREFIX + TIED: PREFIX + EMBEDDING} if is_new else [PREFIX + TIED]

    def __init__(self, config: RelPosConfig) -> None:
        super().__init__(config)
        task = task_of(config.vocab_size, int(config.values["max_positions"]))
        with torch.device("cpu"):
            self.roberta = RelPosRobertaModel.build_model(namespace(config.values), task)
            self.add_head(config)
        self.post_init()

    def add_head(self, config: RelPosConfig) -> None:
        """Register the head, where there is one."""

    def get_input_embeddings(self) -> nn.Module:
        return self.roberta.encoder.sentence_encoder.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The LM head, whose weight is the embedding's."""
        return self.roberta.encoder.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        """Leave what the model drew itself; new heads begin as BERT's do."""
        heads = (self.roberta.classification_heads, self.roberta.span_heads)
        if isinstance(module, nn.Linear) and any(module is m for h in heads for m in h.modules()):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def run(self, input_ids: Tensor, mask: Tensor | None, segments: Tensor | None, **how) -> Tensor:
        """Our model's output for tokens (B, L), where the mask is 1."""
        if mask is not None:
            input_ids = input_ids.masked_fill(mask == 0, PAD)
        return self.roberta(input_ids, segments=segments, **how)[0]


class RelPosModel(RelPosPreTrained):
    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **unused):
        found = self.run(input_ids, attention_mask, token_type_ids, features_only=True)
        return BaseModelOutput(last_hidden_state=found)


class RelPosForMaskedLM(RelPosPreTrained):
    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **unused):
        """Logits (B, L, V), and the loss of labels (B, L) other than -100."""
        logits, loss = self.run(input_ids, attention_mask, token_type_ids), None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)


class RelPosForSequenceClassification(RelPosPreTrained):
    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_classification_head(HEAD, num_classes=config.num_labels)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, **unused):
        """Logits (B, classes), and the loss of labels (B,)."""
        how = {"features_only": True, "classification_head_name": HEAD}
        logits, loss = self.run(input_ids, attention_mask, token_type_ids, **how), None
        if labels is not None and self.config.num_labels == 1:
            loss = nn.functional.mse_loss(logits[:, 0], labels.to(logits.dtype))
        elif labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class RelPosForQuestionAnswering(RelPosPreTrained):
    def add_head(self, config: RelPosConfig) -> None:
        self.roberta.register_question_answering_head(SPAN_HEAD)

    def forward(
        self, input_ids, attention_mask=None, token_type_ids=None, start_positions=None, end_positions=None, **unused
    ):
        """Start and end logits (B, L), and the loss of positions (B,)."""
        logits = self.run(input_ids, attention_mask, token_type_ids, span_head_name=SPAN_HEAD)
        start, end = logits.float().unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            entropy = nn.functional.cross_entropy
            loss = (entropy(start, start_positions) + entropy(end, end_positions)) / 2
        return QuestionAnsweringModelOutput(loss=loss, start_logits=start, end_logits=end)


AUTO = {
    "AutoModel": RelPosModel,
    "AutoModelForMaskedLM": RelPosForMaskedLM,
    "AutoModelForSequenceClassification": RelPosForSequenceClassification,
    "AutoModelForQuestionAnswering": RelPosForQuestionAnswering,
}


def register(config: type[RelPosConfig], models: dict[str, type]) -> None:
    """Make the Auto classes know the folders of a configuration's models."""
    config.models = models
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for name, model in models.items():
        getattr(transformers, name).register(config, model, exist_ok=True)
    transformers.AutoTokenizer.register(config, slow_tokenizer_class=RelPosTokenizer, exist_ok=True)


register(RelPosConfig, AUTO)
