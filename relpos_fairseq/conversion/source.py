"""Describe a model to be converted, of any library, and resolve its position schemes and those of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from relpos_fairseq.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.ledger import Ledger
from relpos_fairseq.conversion.report import ConversionReport, NotComparedError, Outputs, PairProbe
from relpos_fairseq.conversion.vocabulary import Vocabulary
from relpos_fairseq.heads import CHOICES, CLASSIFIER, RANKING, REGRESSION, SPANS, TOKENS, Head, classifier_of
from relpos_fairseq.plan import PositionPlan
from relpos_fairseq.scheme import AttentionShape
from relpos_fairseq.schemes import parse_layers

if TYPE_CHECKING:
    from relpos_fairseq.conversion.writer import GeneratingModel

DEFAULTS = {  # of fairseq's roberta, where a checkpoint does not say
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
class Source:
    """A model to convert, as every library's reader returns it.

    Args:
        kind: whose model it is, in words.
        path: the file or folder.
        notes: assumptions and omissions that the user should know.
        library: the program that computes the source's own outputs, in words.
        ledger: what became of everything that it holds; None: not recorded.
        kept_files: files that no model here reads, by their places in its folder.
    """

    kind: str
    path: Path
    _: KW_ONLY
    notes: list[str] = field(default_factory=list)
    library: str = ""
    ledger: Ledger | None = None
    kept_files: dict[str, Path] = field(default_factory=dict)


@dataclass
class EncoderSource(Source):
    """A BERT or RoBERTa to convert.

    Args:
        state: its tensors under the names of `relpos_roberta`.
        values: values of RelPosRobertaConfig.
        vocabulary: its rows in fairseq's order, for a Hugging Face folder.
        files: dict.txt and the tokenizer's files, as far as they lie beside it.
        task: options of the task that it was trained on, `_name` among them; empty: not known, or
            what its heads are for.
        labels: names of a classifier's classes, in their order; empty: not known.
        problem: transformers' problem_type of a classifier; None: not named.
        head: what the name of its class in transformers ends in; empty: not known.
        kept: tensors that no model here reads, by their names in transformers, for the way back.
        family: transformers' model_type of the folder that it was; empty: it was none.
        named: keys of its config.json that are written as they were: names of classes, token types.
        source_rows: for a converted checkpoint, the numbers that its rows had before.
        outputs: runs the source in its own library, on (tokens, segments) in fairseq's order of
            rows; returns outputs by name, or raises NotComparedError where the library cannot.
    """

    state: State
    values: dict[str, Any]
    vocabulary: Vocabulary | None = None
    files: list[Path] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    problem: str | None = None
    head: str = ""
    kept: dict[str, Tensor] = field(default_factory=dict)
    family: str = ""
    named: dict[str, Any] = field(default_factory=dict)
    source_rows: list[int] | None = None
    outputs: Callable[[Tensor, Tensor | None], Outputs] | None = None

    def problem_of(self, classes: int) -> str | None:
        """Return transformers' problem_type of its classifier; None: transformers decides, as in its own folder."""
        regression = classes == 1 or self.task.get("regression_target")
        return self.problem or (REGRESSION if regression and not self.head else None)

    def kind_of(self, place: str, name: str) -> Head:
        """Return the kind of a head by its place (`classification_heads`, ...) and name in the model."""
        if place == "classification_heads":
            return CHOICES if self.task.get("_name") == RANKING and name == classifier_of(self.task) else CLASSIFIER
        return SPANS if place == "span_heads" else TOKENS

    @property
    def plan(self) -> PositionPlan:
        return plan_of(self.values)

    @property
    def rows(self) -> int:
        return len(self.state[f"{ENCODER}.embed_tokens.weight"])


@dataclass
class GeneratingSource(Source):
    """A translation or language model to convert, already imported as one of relpos's models.

    Args:
        model: the same model as a `relpos_transformer`, `relpos_transformer_lm` or `relpos_transformer_xl`.
        logits: runs the source in its own library on sentence pairs in fairseq's order of rows;
            returns (B, T, V) in the same order, or raises NotComparedError where the library cannot.
        texts: dictionaries of the result, by file name.
        report: what the import did.
        known: whether the source has each of the target dictionary's rows; None: it has all.
        takes: options of the conversion that its reader used.
    """

    model: GeneratingModel
    logits: Callable[[PairProbe], Tensor]
    texts: dict[str, str] = field(default_factory=dict)
    report: ConversionReport = field(default_factory=lambda: ConversionReport("", ""))
    known: list[bool] | None = None
    takes: tuple[str, ...] = ()


def never_run(why: str) -> Callable[..., Tensor]:
    """Return the `logits` of a source that relpos does not run: they raise NotComparedError, which says why."""

    def run(pair: PairProbe) -> Tensor:
        raise NotComparedError(why)

    return run


def separators_of(task: dict[str, Any]) -> int | None:
    """Return the number of further </s> between the texts of a pair, 0 or 1, from a task's options; None: not said."""
    if task.get("_name") in ("sentence_prediction", RANKING):
        return int(task.get("separator_token") is not None)
    return int(task["separators"]) - 1 if task.get("separators") in ("1", "2") else None


def plan_of(values: dict[str, Any]) -> PositionPlan:
    """Resolve the positions of a config: values of RelPosRobertaConfig to a PositionPlan.

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


def target_values(source: EncoderSource, scheme: str, given: dict[str, str | None]) -> dict[str, Any]:
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
