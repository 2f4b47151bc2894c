"""A model to convert, and what its positions are and shall be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from relpos_fairseq.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.vocabulary import Vocabulary
from relpos_fairseq.placement import PositionPlan
from relpos_fairseq.scheme import AttentionShape
from relpos_fairseq.schemes import parse_layers

Outputs = dict[str, Tensor]
DEFAULTS = {  # fairseq's roberta where a checkpoint does not say
    "encoder_layers": 12,
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_attention_heads": 12,
    "activation_fn": "gelu",
    "pooler_activation_fn": "tanh",
    "encoder_normalize_before": False,
    "untie_weights_roberta": False,
    "layer_norm_eps": 1e-5,
}
_LEFT_OUT = {"encoder_position_scheme", "decoder_position_scheme"} | {o.field for o in OPTIONS if o.training_only}
POSITION_FIELDS = tuple(part.name for part in fields(PositionConfig) if part.name not in _LEFT_OUT)

_KEPT = ("segment_encoding", "segment_share", "num_segments", "attention_backend")  # of any scheme


@dataclass
class SourceModel:
    """A model to convert.

    Args:
        kind: `relpos_roberta`, `roberta` (fairseq's), or `bert`, `roberta` of `Hugging Face`.
        path: the file or folder.
        state: its tensors under our names.
        values: our config's values.
        vocabulary: its rows in fairseq's order, for a Hugging Face folder.
        files: dict.txt and the tokenizer's files, as far as they lie beside it.
        notes: what should be said of it.
        task: options of the task that it was trained on, `_name` among them; empty: not known, or
            what its heads are for.
        labels: names of a classifier's classes, in their order; empty: not known.
        source_rows: for a converted checkpoint, the numbers that its rows had before.
        outputs: runs the original: (tokens, segments) to its outputs by name, in fairseq's order.
    """

    kind: str
    path: Path
    state: State
    values: dict[str, Any]
    vocabulary: Vocabulary | None = None
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    source_rows: list[int] | None = None
    outputs: Callable[[Tensor, Tensor | None], Outputs] | None = None

    @property
    def plan(self) -> PositionPlan:
        return plan_of(self.values)

    @property
    def rows(self) -> int:
        return len(self.state[f"{ENCODER}.embed_tokens.weight"])


def plan_of(values: dict[str, Any]) -> PositionPlan:
    """Resolve the positions that our config's values ask for.

    Raises:
        ValueError: a position flag that is wrong or does not apply.
    """
    shape = AttentionShape(
        embed_dim=int(values["encoder_embed_dim"]),
        num_heads=int(values["encoder_attention_heads"]),
        max_positions=int(values["max_positions"]),
        length_flag="--positions",
        seed_name="encoder",
    )
    given = {name: str(values[name]) for name in POSITION_FIELDS if values.get(name) is not None}
    return resolve(PositionConfig(**given), shape, "masked_lm")


def target_values(source: SourceModel, scheme: str, given: dict[str, str | None]) -> dict[str, Any]:
    """Return the source's config with other positions.

    An option that is not given is the source's own where source and target have a member that takes
    it in common, and else the target's default.

    Args:
        source: what is converted.
        scheme: the target's position scheme, or `same`.
        given: options by the names of our config (`max_positions` included); None: not given.
    """
    values = dict(source.values)
    scheme = source.plan.name if scheme == "same" else scheme
    mine = {member.name for members in parse_layers(scheme) for member in members}
    common = [member for member in source.plan.members if member.scheme.name in mine]
    kept = {option.field for member in common for option in member.scheme.takes}
    for name in POSITION_FIELDS:
        keep = name in kept or name in _KEPT
        values[name] = values.get(name) if keep else None
    values["position_scheme"] = scheme
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("segment_encoding") == "none" and given.get("num_segments") is None:
        values["num_segments"] = None
    return values
