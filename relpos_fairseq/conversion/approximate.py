"""What is left of a conversion where the algebra does not nest, and what is lost by it.

- a parameter that the target's options drop or add (`complete`);
- a member that the target has no words for (`dropped`): `learned -> m4`, the papers' near drop-in,
  drops the absolute table.

How far the logits move is measured afterwards (`fidelity`), and `fit` starts the new tables by
least squares from what the old model does.
"""

from __future__ import annotations

import torch

from relpos_fairseq.conversion import exact
from relpos_fairseq.conversion.layouts import Params
from relpos_fairseq.conversion.report import ConversionReport
from relpos_fairseq.scheme import PositionScheme

_MEANS = {
    "theta": "the reset of the first token",
    "content_bias": "u",
    "position_bias": "v",
}


def complete(
    params: Params,
    before: Params,
    old: PositionScheme,
    new: PositionScheme,
    report: ConversionReport,
) -> Params:
    """Parameters that the target's options add start at zero; those that they drop are left out.

    Args:
        params: what a rule made of the source's.
        before: the source's own.
        old: the source's scheme.
        new: the target's scheme.
        report: told what is lost.
    """
    result = dict(params)
    wanted = dict(new.named_parameters())
    silent = exact.is_neutral(old, before)
    for name in [name for name in wanted if name not in result]:
        if name == "theta" and not silent:
            report.lose(f"{new.name}: the reset takes the first token's row and column")
        result[name] = torch.zeros_like(wanted[name])
    for name in [name for name in result if name not in wanted]:
        value = result.pop(name)
        if bool(value.any()) or (name == "theta" and not silent):
            report.lose(f"{new.name}: {_MEANS.get(name, name)} of {old.name} is dropped")
    if old.name == new.name:
        _options(result, old, new, report)
    return result


def _options(
    params: Params, old: PositionScheme, new: PositionScheme, report: ConversionReport
) -> None:
    """Options of one scheme that change its formula or a table's width."""
    rank = {name: value.size(-1) for name, value in params.items() if name == "position_table"}
    for name, has in rank.items():
        wants = getattr(new, name).size(-1)
        if has > wants and bool(params[name][..., wants:].any()):
            report.lose(f"{new.name}: rank {has} cut to {wants}")
        grown = torch.nn.functional.pad(params[name], (0, max(wants - has, 0)))
        params[name] = grown[..., :wants]
    if old.options.num_segments != new.options.num_segments:
        _segments(params, old, new, report)
    lengths = {old.options.clamp_len, new.options.clamp_len} - {0}
    if old.options.clamp_len != new.options.clamp_len:
        report.limit(f"inputs of up to {min(lengths) + 1} tokens (clamp_len)")
    if old.options.p2c_index != new.options.p2c_index:
        table = params["table"]
        if not torch.equal(table, table.flip(1)):
            report.lose(
                f"{new.name}: p2c index {old.options.p2c_index} -> {new.options.p2c_index} reads "
                f"the key term's table in the other direction"
            )


def _segments(
    params: Params, old: PositionScheme, new: PositionScheme, report: ConversionReport
) -> None:
    """More segments start at zero; fewer lose what their rows held."""
    has, wants = old.options.num_segments, new.options.num_segments
    for name, value in params.items():
        pairs = name == "pair_table"  # (heads, segments^2)
        table = value.unflatten(1, (has, has)) if pairs else value
        axes = (1, 2) if pairs else (0,)
        for axis in axes:
            if table.narrow(axis, min(has, wants), max(has - wants, 0)).any():
                report.lose(f"{new.name}: {has} segments become {wants}")
            kept = table.narrow(axis, 0, min(has, wants))
            shape = list(kept.shape)
            shape[axis] = wants - kept.size(axis)
            table = torch.cat([kept, kept.new_zeros(shape)], dim=axis)
        params[name] = table.flatten(1) if pairs else table


def dropped(name: str, layers: list[Params]) -> str:
    """A member that is left out, in words: its tables and how large they are."""
    tables = [value for params in layers for value in params.values()]
    if not tables:
        return f"{name} is dropped (it has no parameters, and acts all the same)"
    numbers = sum(value.numel() for value in tables)
    rms = (sum(float(v.double().square().sum()) for v in tables) / numbers) ** 0.5
    return f"{name} is dropped ({numbers:,} numbers of root mean square {rms:.3g})"
