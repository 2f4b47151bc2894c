"""Press et al. 2022, ALiBi: Train Short, Test Long (arXiv:2108.12409).

    e_ij = q_i . k_j / sqrt(d) - m_h |j - i|,   m_h = 2^(-8 h / H) for h = 1..H

For a number of heads that is no power of two the released code takes the slopes of the next lower
power and every second one of the next higher.  The paper is causal; in an encoder the distance is
symmetric, as its authors suggest.  Nothing is learned.

`alibi_learned` learns the slopes (Press section 3 tried it), which start at those above: m -> exp(`log_slope`),
so that they stay positive.  In an encoder it has the form of Lee et al. 2022, LittleBird (arXiv:2210.11870):

    e_ij = q_i . k_j / sqrt(d) - D_ij
    D_ij = 0 if i = j;  a if i = 0 or j = 0;  b (i - j) if i > j;  c (j - i) if i < j

    a, b, c -> exp of `log_first`, `log_past`, `log_future`

or, with --position-alibi-form symmetric, one slope m for both sides.  The exponent is x-transformers' (learned
ALiBi, versions of 2021 to 2023); a, too, starts at ALiBi's slope.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import RESET_CLS, SCALE, SHARE, Choice
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.scheme import (
    AttentionShape,
    ConversionSource,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.core.terms import PositionTerms, Reset

FORM = Choice(
    name="alibi_form",
    place=125,
    help="slopes in an encoder: littlebird (one for each side, and a distance of its own to the first token) or "
    "symmetric",
    auto=lambda shape: "symmetric" if shape.causal else "littlebird",
    auto_help="littlebird",
    choices=("littlebird", "symmetric"),
)


def slopes(heads: int) -> list[float]:
    """Return the head-specific slopes m_h, steepest first."""
    power = 1 << (heads.bit_length() - 1)
    values = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    if power < heads:
        values += slopes(2 * power)[0::2][: heads - power]
    return values


@register_scheme("alibi")
class Alibi(PositionScheme):
    """A fixed linear penalty on distance."""

    info = SchemeInfo(200, "Press 2022", "q·k/√d - m_h|j-i|", "fixed")
    takes = frozenset({SCALE, RESET_CLS})
    never_neutral = "it has no parameter, and penalises distance"

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and the penalties (H, R)."""
        relation = Clipped.unclipped(positions)
        distance = relation.distances(positions.device).abs()
        steepness = torch.tensor(slopes(self.shape.num_heads), dtype=torch.float64)
        return relation, -steepness.to(positions.device)[:, None] * distance

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the penalties."""
        relation, static = prepared
        return (PositionTerms(relation=relation, static=static, reset=self.reset_at(positions)),)


def _from_fixed(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from alibi: log m."""
    _, penalties = source.old.prepare(Positions(2, 2))  # (H, 3), of the distances -1, 0, 1
    log = (-penalties[:, 0]).log()
    if source.new.lopsided:
        source.report.lose("alibi_learned: the first token has one distance from all others")
    return dict.fromkeys((name for name, _ in source.new.named_parameters()), log)


def _other_form(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from the other form: slopes of both sides are those of one, but not the first token's distance."""
    if source.old.lopsided != source.new.lopsided:
        source.report.lose("alibi_learned: the first token has one distance from all others in one form alone")
    return source.params


@register_scheme("alibi_learned")
class LearnedAlibi(PositionScheme):
    """A linear penalty on distance with learned slopes."""

    info = SchemeInfo(
        202,
        "Press 2022 §3; Lee 2022",
        "q·k/√d - m|j-i|; encoders: m past, m' future, a to and from token 0",
        "ALiBi's slopes",
    )
    takes = frozenset({SCALE, SHARE, FORM})
    default_share = "none"
    log_slope: nn.Parameter
    log_past: nn.Parameter
    log_future: nn.Parameter
    log_first: nn.Parameter
    tables = {
        "log_slope": Table(copies=("log_past", "log_future")),
        "log_past": Table(),
        "log_future": Table(),
        "log_first": Table(),
    }
    never_neutral = "its slopes stay above zero"
    convert_from = {"alibi": _from_fixed, "alibi_learned": _other_form}

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the logarithms of the slopes: (heads|1,) each."""
        super().__init__(shape, options)
        start = torch.tensor(slopes(shape.num_heads)[: self.table_heads]).log()
        for name in ("log_past", "log_future", "log_first") if self.lopsided else ("log_slope",):
            self.register_parameter(name, nn.Parameter(start.clone()))

    @property
    def lopsided(self) -> bool:
        """True in LittleBird's form, which is for encoders."""
        return self.options.alibi_form == "littlebird" and not self.shape.causal

    @classmethod
    def counts_tokens(cls, options: SchemeOptions) -> bool:
        """Return whether it asks which token is a row's first."""
        return options.alibi_form == "littlebird"

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and the penalties (heads|1, R)."""
        relation = Clipped.unclipped(positions)
        past, future = (self.log_past, self.log_future) if self.lopsided else (self.log_slope, self.log_slope)
        distance = relation.distances(positions.device)
        exact = torch.promote_types(past.dtype, torch.float32)
        steepness = torch.where(distance < 0, past.to(exact).exp()[:, None], future.to(exact).exp()[:, None])
        return relation, -steepness * distance.abs()

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the penalties, and LittleBird's for the first token: a in its row and column, 0 where they meet."""
        relation, static = prepared
        if not self.lopsided:
            return (PositionTerms(relation=relation, static=static),)
        away, slot = self.log_first.to(static.dtype).exp(), positions.first_slot()
        is_first = torch.arange(positions.src_len, device=slot.device) == slot[:, None]  # (B|1, S)
        keys = is_first[:, None, :, None].to(static.dtype)
        queries = positions.query_rows(keys, axis=2) * away[:, None, None]
        met = PositionTerms(static_factors=(queries, keys))
        return PositionTerms(relation=relation, static=static, reset=Reset(-away, -away, slot)), met
