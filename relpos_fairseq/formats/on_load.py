"""Convert a checkpoint when training begins from it: `--finetune-from-model` under another position scheme.

fairseq's RoBERTa, or a relpos_roberta with other positions, is converted to the scheme of the flags; every step is
logged, and each loss is a warning. Encoders and decoders of the other relpos models are converted where that is exact,
and else refused. A resume and `--restore-file` never convert: a checkpoint with other positions is an error that names
both schemes, and for a plain RoBERTa one that says how to convert it. Attention is compared (`attention_check`), the
models' outputs are not.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from relpos_fairseq.conversion import ConversionError, NotExactError, convert, layouts
from relpos_fairseq.conversion.layouts import ENCODER
from relpos_fairseq.conversion.report import ConversionReport
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.plan import PositionPlan, decode_text
from relpos_fairseq.core.scheme import AttentionShape, PositionMismatchError
from relpos_fairseq.saved.model import SavedModel

if TYPE_CHECKING:
    from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel

logger = logging.getLogger(__name__)
# Options that change what the tensors compute, though a checkpoint loads under any value of them.
_MUST_AGREE = (
    *("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads"),
    *("activation_fn", "layer_norm_eps", "encoder_normalize_before", "no_layernorm_embedding"),
)


def prepare(checkpoint: dict[str, Any], path: str, model: RelPosRobertaModel, converts: bool) -> None:
    """Convert a RoBERTa checkpoint to a model's positions, in place, if --finetune-from-model names it.

    Raises:
        ConversionError: it is a plain RoBERTa and may not be converted, or no RoBERTa, or its
            options contradict the model's.
        ValueError: it has fewer absolute positions than the model.
    """
    plain = layouts.VERSION not in checkpoint["model"]
    if not converts:
        if plain:
            raise ConversionError(
                f"{path} has no position scheme of relpos_roberta: --finetune-from-model converts "
                f"fairseq's RoBERTa, a resume and --restore-file never do"
            )
        return
    from relpos_fairseq.formats.fairseq import from_checkpoint

    source = from_checkpoint(Path(path), checkpoint)
    _check(source, model, path)
    plan = model.encoder.sentence_encoder.positions.plan
    done = convert(source.state, source.plan, plan, allow_loss=True)
    unchanged = not plain and all(
        key in checkpoint["model"] and checkpoint["model"][key].shape == value.shape
        for key, value in done.state.items()
    )
    if unchanged and source.plan.describe() == plan.describe():
        return
    checkpoint["model"] = done.state
    _log(done.report, path, source.kind)


def _log(report: ConversionReport, path: str, kind: str) -> None:
    logger.info("converting %s (%s) on load", path, kind)
    for line in report.lines():
        level = logging.WARNING if line.startswith("lost") else logging.INFO
        logger.log(level, "conversion: %s", line)


def prepare_sides(checkpoint: dict[str, Any], path: str, model: nn.Module) -> None:
    """Convert an encoder's and a decoder's positions to a model's, in place, where that is exact.

    Raises:
        PositionMismatchError: the model's schemes cannot say the same; names what would be lost.
        ConversionError: the checkpoint's options contradict its tensors.
    """
    state = checkpoint["model"]
    parts = {side: getattr(model, side, None) for side in ("encoder", "decoder")}
    found = {side: getattr(part, "positions", None) for side, part in parts.items()}
    plans = {side: one.plan for side, one in found.items() if isinstance(one, Placement)}
    for side, target in plans.items():
        version = state.get(f"{side}.positions.scheme_version")
        if version is None or decode_text(version) == target.describe():
            continue
        source = _plan_of_side(checkpoint, path, side, tuple(plans), target.shape)
        if source.describe() != decode_text(version):
            raise ConversionError(
                f"{path}: its tensors say [{decode_text(version)}] of positions, its options [{source.describe()}]"
            )
        own = {key: state.pop(key) for key in list(state) if key.startswith(f"{side}.")}
        inner = {f"{ENCODER}.{key.removeprefix(f'{side}.')}": own[key] for key in own}
        try:
            done = convert(inner, source, target)
        except NotExactError as error:
            raise PositionMismatchError(
                f"{path}: its {side} was trained with [{source.describe()}], the flags say "
                f"[{target.describe()}], which cannot compute the same ({error.lost}): give the "
                f"checkpoint's flags, or add to them as in {source.name}+SCHEME"
            ) from None
        state |= {f"{side}.{k.removeprefix(f'{ENCODER}.')}": v for k, v in done.state.items()}
        _log(done.report, path, side)


def _plan_of_side(
    checkpoint: dict[str, Any], path: str, side: str, sides: tuple[str, ...], shape: AttentionShape
) -> PositionPlan:
    """Resolve the positions that a checkpoint's encoder or decoder was trained with."""
    options = SavedModel(Path(path), checkpoint).options.model
    names = [part.name for part in fields(PositionConfig)]
    given = {name: str(options[name]) for name in names if options.get(name) is not None}
    both = len(sides) == 2
    kind = "translation" if both else "language_model"
    return resolve(PositionConfig(**given), shape, kind, side=side, sides=sides if both else ())


def _check(source: SavedModel, model: RelPosRobertaModel, path: str) -> None:
    """Check that a checkpoint's sizes and options agree with the model's.

    Raises:
        ConversionError: names the option that differs.
    """
    for name in _MUST_AGREE:
        has, wants = source.values[name], getattr(model.args, name)
        if str(has) != str(wants):
            raise ConversionError(
                f"{path} has {name} {has}, and the flags say {wants}: give --{name.replace('_', '-')} {has}"
            )
    rows = model.encoder.sentence_encoder.embed_tokens.num_embeddings
    if source.rows != rows:
        raise ConversionError(
            f"{path} has {source.rows} rows of tokens, and this data's dictionary {rows}: binarise "
            f"the data with the dict.txt that belongs to it"
        )
    if source.values.get("untie_weights_roberta") and not model.args.untie_weights_roberta:
        raise ConversionError(f"{path} has an output projection of its own: give --untie-weights-roberta")
