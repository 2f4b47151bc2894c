"""Positions over memory and segment: relative ones, which tell remembered tokens from new ones."""

from __future__ import annotations

from typing import Any

from relpos_fairseq.models.decoder import decoder_positions
from relpos_fairseq.placement import Placement


def memory_positions(cfg: Any) -> Placement:
    """Return the positions that a config asks for; tables cover memory and segment.

    Raises:
        ValueError: a scheme that reads absolute positions, or random ones.
    """
    flags = "--tokens-per-sample and --mem-len"
    placement = decoder_positions(cfg, "language_model", sides=(), length_flag=flags, memory=cfg.mem_len)
    absolute = [m.scheme for m in placement.plan.members if m.scheme.absolute]
    on_input = all(scheme.own_scale is None for scheme in absolute)
    if absolute and not (cfg.absolute_memory and on_input):
        raise ValueError(
            f"position scheme {' and '.join(scheme.name for scheme in absolute)} cannot carry "
            f"memory: it numbers tokens from the start of each segment, so the tokens of a "
            f"remembered segment would have the same positions as those of the current one and "
            f"could not be told apart (temporal confusion, Dai 2019 section 3.3); choose a "
            f"relative scheme, or --arch relpos_transformer_lm (--absolute-memory shows what it "
            f"costs, with positions on the input alone)"
        )
    if placement.plan.random_range:
        raise ValueError(
            f"--position-random-range {placement.plan.random_range} cannot carry memory: a "
            f"segment draws its positions among L, and those of the remembered tokens, which "
            f"go on without end, would be drawn anew in every segment; leave it out, or "
            f"choose --arch relpos_transformer_lm"
        )
    return placement
