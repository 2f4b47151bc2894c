"""Translation and language models of tensors: built, run, and written as fairseq checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.tasks.language_modeling import LanguageModelingConfig
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf
from torch import Tensor, nn

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.writer import Rows, config_of, fairseq_checkpoint, load_tensors
from relpos_fairseq.models.config.encoder_decoder import RelPosTransformerConfig
from relpos_fairseq.models.config.language_model import RelPosTransformerLMConfig
from relpos_fairseq.models.config.transformer_xl import RelPosTransformerXLConfig
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel
from relpos_fairseq.models.relpos_transformer_lm import RelPosTransformerLanguageModel
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.placement import decode_text
from relpos_fairseq.tasks.segment_language_modeling_config import SegmentLanguageModelingConfig

IDENTITY = ".positions.scheme_version"
# By kind: the model, its name and config, the task's config and name, and the criterion.
KINDS = {
    "translation": (
        RelPosTransformerModel,
        "relpos_transformer",
        RelPosTransformerConfig,
        TranslationConfig,
        "label_smoothed_cross_entropy",
    ),
    "language_modeling": (
        RelPosTransformerLanguageModel,
        "relpos_transformer_lm",
        RelPosTransformerLMConfig,
        LanguageModelingConfig,
        "cross_entropy",
    ),
    "segment_language_modeling": (
        RelPosTransformerXLModel,
        "relpos_transformer_xl",
        RelPosTransformerXLConfig,
        SegmentLanguageModelingConfig,
        "cross_entropy",
    ),
}


@dataclass
class Generating:
    """A translation or language model of ours.

    Args:
        kind: of KINDS, which is also the name of its task.
        values: of our config; what is not named is its default.
        rows: of the embeddings of input and output.
        state: tensors.
        task: options of its task, `_name` among them.
        files: of text, by the names that they shall have.
        criterion: its options; what is not named is that of KINDS.
    """

    kind: str
    values: dict[str, Any]
    rows: tuple[int, int]
    state: State
    task: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    criterion: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        plans = {name: value for name, value in self.state.items() if name.endswith(IDENTITY)}
        return "; ".join(f"{name.split('.')[0]}: {decode_text(value)}" for name, value in sorted(plans.items()))

    def checkpoint(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return a fairseq checkpoint; what is told `about` it is kept as `conversion`."""
        _, name, config, task, criterion = KINDS[self.kind]
        known = {part.name for part in fields(task)}
        told = {key: value for key, value in self.task.items() if key in known}
        told |= {"_name": self.task.get("_name", self.kind), "data": "."}
        cfg = config_of(
            OmegaConf.merge(config(), self.values | {"_name": name}),
            OmegaConf.merge(task(), told),
            {"_name": criterion} | self.criterion,
        )
        return fairseq_checkpoint(cfg, self.state, about, "CrossEntropyCriterion")


def build(kind: str, values: dict[str, Any], rows: tuple[int, int]) -> nn.Module:
    """Build a model of KINDS; values of our config that are not named are its defaults."""
    model, _, base, _, _ = KINDS[kind]
    config = base()
    for name, value in values.items():
        setattr(config, name, value)
    target = Rows(rows[1])
    source = target if rows[0] == rows[1] else Rows(rows[0])
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target, carries_memory=True)
    return model.build_model(config, task)


def shared_names(model: nn.Module) -> dict[str, str]:
    """Return names of parameters that are others, by the name of which."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before != name:
            found[name] = before
    return found


@torch.no_grad()
def logits_of(checkpoint: dict[str, Any], kind: str, rows: tuple[int, int], source: Tensor, target: Tensor) -> Tensor:
    """Scores (B, T, V) of a checkpoint after each target token, in fp64.

    Sources (B, S) end in </s>, and a language model reads none; targets (B, T) begin with </s>.

    Raises:
        ConversionError: its tensors do not fit its options.
    """
    values = {name: v for name, v in checkpoint["cfg"]["model"].items() if name != "_name"}
    model = load_tensors(build(kind, values, rows), checkpoint["model"], torch.float64)
    encoded = model.encoder(source) if kind == "translation" else None
    output = model.decoder(target, encoded)[0]
    softmax = model.decoder.adaptive_softmax
    return output if softmax is None else softmax.get_log_prob(output, None)


def plain_task(task: Any) -> dict[str, Any]:
    """Return a task's options that are no paths and no references to other options."""
    return {
        name: value
        for name, value in task.items()
        if name not in ("data", "tokenizer_folder")
        and isinstance(value, str | int | float | bool | None)
        and not str(value).startswith("${")
    }


def check_rows(files: dict[str, Path], rows: tuple[int, int]) -> None:
    """Compare dictionaries with a model's rows.

    Raises:
        ConversionError: they are another model's.
    """
    for name, path in files.items():
        if Path(name).name.startswith("dict."):
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            if len(lines) + 4 not in rows:
                raise ConversionError(f"{path} makes {len(lines) + 4} rows, the model has {rows}")
