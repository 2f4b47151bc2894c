"""What is left of a conversion where the algebra does not nest, and what is lost by it.

- a parameter that the target's options drop or add (`complete`);
- a member that the target has no words for (`dropped`): `learned -> m4`, the papers' near drop-in,
  drops the absolute table.

How far the logits move is measured afterwards (`fidelity`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from relpos_fairseq.conversion import exact
from relpos_fairseq.conversion.layouts import Params
from relpos_fairseq.takeover import Takeover


def complete(params: Params, source: Takeover) -> Params:
    """Return what the target's options make of what a rule made of the source's parameters.

    Parameters that they add start at zero; those that they drop are left out.
    """
    old, new, report = source.old, source.new, source.report
    wanted = dict(new.named_parameters())
    silent = exact.is_neutral(old, source.params)
    for name in wanted.keys() - params.keys():
        if name == "theta" and not silent:
            report.lose(f"{new.name}: the reset takes the first token's row and column")
    added = {name: torch.zeros_like(wanted[name]) for name in wanted if name not in params}
    for name, value in params.items():
        if name not in wanted and (bool(value.any()) or (name == "theta" and not silent)):
            meaning = old.table_of(name).meaning or name
            report.lose(f"{new.name}: {meaning} of {old.name} is dropped")
    result = {name: value for name, value in params.items() if name in wanted} | added
    if old.name == new.name and new.name in new.takes_over:
        result = new.takes_over[new.name](replace(source, params=result))
    return result


def dropped(name: str, layers: list[Params]) -> str:
    """Say in words which member is left out: its tables and how large they are."""
    tables = [value for params in layers for value in params.values()]
    if not tables:
        return f"{name} is dropped (it has no parameters, and acts all the same)"
    numbers = sum(value.numel() for value in tables)
    rms = (sum(float(v.double().square().sum()) for v in tables) / numbers) ** 0.5
    return f"{name} is dropped ({numbers:,} numbers of root mean square {rms:.3g})"
