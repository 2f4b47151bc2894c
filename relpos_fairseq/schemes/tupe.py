"""Ke et al. 2020, TUPE (arXiv:2006.15595): `tupe` and `tupe_a` as M4M writes them, `tupe_released`.

`tupe`, M4M eq. 8-10 (`tupe_a` has no s):

    e_ij = q_i . k_j / sqrt(2d) + reset( p_i U^Q . p_j U^K / sqrt(2d) + s_r , i, j)

    p -> `position_table`, U^Q, U^K -> `query_projection`, `key_projection`, s -> `bias_table`,
    theta_1, theta_2 of the reset -> `theta`

M4M gives p the width d and shares it among heads (its Table 5); Ke's own p has the width of the model,
a layer norm, and serves all layers: --position-share layers shares it among layers, with the width d a
head.  s is read by clipped distance; Ke buckets it as T5 does.  M4M's Table 5 counts one projection for
queries and keys: --position-projections one.  Chen2021 eq. 5 divides the whole sum by sqrt(d):
--position-scale 1 --position-scalars inside (theta, which is learned, stays in logit units).  The
product is kept as two factors of rank d, never as a (T, S) table.

`tupe_released`, the authors' code (guolinke/TUPE), the rows "Ke et al." of Chen2021:

    e_ij = q_i . k_j / sqrt(2d) + reset( Q_i . K_j / sqrt(2d) + s_bucket(j - i) , i, j)
    Q_i = W_Q norm(p_i) + b_Q,  K_j = W_K norm(p_j) + b_K

    p -> `position_table`, norm -> `norm_weight`, `norm_bias`, W_Q, b_Q -> `query_projection`,
    `query_bias`, W_K, b_K -> `key_projection`, `key_bias`, s -> `bias_table`, reset -> `theta`

Here p has the width of the model and a layer norm, the projections have biases, s has T5's 32 buckets
up to 128, and all layers share these parameters.  The code writes the reset as p.p + s of rows that
nothing else reads; `theta` is that sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.core.options import CLIP_DISTANCE, INIT, PROJECTIONS, RESET_CLS, SCALE, SHARE, Choice, only
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Bucketed
from relpos_fairseq.core.scheme import (
    WITH_BOTH,
    AttentionShape,
    ConversionSource,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.core.terms import PositionTerms

SCALARS = Choice(
    name="scalars",
    place=57,
    help="relative scalars are added outside the division by the scale, or inside it",
    auto="outside",
    choices=("outside", "inside"),
    later=True,
)


def _from_factors(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from abs_scalar: p = P, U^Q = sqrt(C d), U^K = 1, where P's rank is at most d; s = 0."""
    table, dim = source.params["position_table"], source.new.shape.head_dim
    rank = table.size(-1)
    if rank > dim:
        source.report.lose(f"{source.old.name}: rank {rank} exceeds {dim}, the width of TUPE's positions")
    table = torch.nn.functional.pad(table, (0, dim - rank))  # a negative width cuts
    one = source.identities(table)
    made = {"position_table": table}
    if source.new.options.projections == "one":
        made["projection"] = one * source.new.scale**-0.5
    else:
        made |= {"query_projection": one / source.new.scale, "key_projection": one}
    if hasattr(source.new, "bias_table"):
        made["bias_table"] = source.zeros("bias_table", table)
    return source.reset() | made


@register_scheme("tupe_a")
class TupeAbsolute(PositionScheme):
    """Correlations of absolute positions, apart from those of the content."""

    info = SchemeInfo(
        150,
        "Ke 2020; M4M eq. 8-10 without s",
        "q·k/√(2d) + reset_θ(pᵢU^Q·pⱼU^K/√(2d))",
        "p N(0, 0.02), U N(0, 1/d), θ 0",
        published="-",
    )
    takes = frozenset({SCALE, SHARE, RESET_CLS, INIT, PROJECTIONS})
    own_scale = 2.0
    default_share = "heads"
    absolute = True
    table_limited = True
    resets_by_default = True
    # Neutral by U^Q = 0 alone, so that gradients still reach every table.
    tables = {
        "position_table": Table(rows="position", axis=1),
        "query_projection": Table(neutral=0.0, grows=WITH_BOTH),
        "key_projection": Table(),
        "projection": Table(neutral=0.0, grows=(0.5, 0.5), copies=("query_projection", "key_projection")),
    }
    convert_from = {"abs_scalar": _from_factors}
    query_projection: nn.Parameter
    key_projection: nn.Parameter
    projection: nn.Parameter

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create `position_table`: (heads|1, max_positions, D), and two projections or one: (heads|1, D, D)."""
        super().__init__(shape, options)
        heads, dim = self.table_heads, shape.head_dim
        self.position_table = self.draw(heads, shape.max_positions, dim, std=0.02)
        one = options.projections == "one"
        for name in ("projection",) if one else ("query_projection", "key_projection"):
            setattr(self, name, self.draw(heads, dim, dim, std=dim**-0.5))
        if one:
            self.never_neutral = "U = 0 is neutral, but no gradient leaves it"

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for `content` projections: they take the model's width, and this table has a head's width."""
        only(PROJECTIONS, options.projections, ("own", "one"), cls.name)

    def prepare(self, positions: Positions) -> Any:
        """Return p U^Q / sqrt(2d) and p U^K for every position that may occur: (heads|1, n, D)."""
        used = self.position_table[:, : positions.stop]
        if self.options.projections == "one":
            product = used @ self.projection
            return product * self.scale, product
        return used @ self.query_projection * self.scale, used @ self.key_projection

    def terms(self, prepared: tuple[Tensor, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the two factors of the position product."""
        self.check_length(positions)
        return (PositionTerms(position_factors=prepared, reset=self.reset_at(positions)),)


def _without_scalars(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from tupe_a: s = 0."""
    zeros = source.zeros("bias_table", source.params["position_table"])
    return source.params | {"bias_table": zeros}


def _scalars_alone(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from rel_scalar: U^Q = 0 (without reset, unless both reset)."""
    fresh = {name: value.detach() for name, value in source.new.named_parameters()}
    made = {"bias_table": source.remap_table("bias_table") / _factor(source.new)}
    for name in {"query_projection", "projection"} & fresh.keys():
        made[name] = torch.zeros_like(fresh[name])
    return fresh | source.params | made


def _factor(scheme: PositionScheme) -> float:
    """Return the factor of s in the logits."""
    return scheme.scale if scheme.options.scalars == "inside" else 1.0


def _other_options(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from other options: move s inside the division by the scale, or out of it."""
    change = _factor(source.old) / _factor(source.new)
    return source.params | {"bias_table": source.params["bias_table"] * change}


@register_scheme("tupe")
class Tupe(TupeAbsolute):
    """Correlations of absolute positions apart from the content, and relative scalars."""

    info = SchemeInfo(
        160,
        "Ke 2020; M4M eq. 8-10",
        "q·k/√(2d) + reset_θ(pᵢU^Q·pⱼU^K/√(2d) + sᵣ)",
        "p N(0, 0.02), U N(0, 1/d), s and θ 0",
        published="454K (M4M Table 5)",
        difference="M4M counts one of the two projections and neither theta",
    )
    takes = TupeAbsolute.takes | {CLIP_DISTANCE, SCALARS}
    clip = "scalars"
    tables = TupeAbsolute.tables | {"bias_table": Table(rows="distance", neutral=0.0)}
    convert_from = {
        "tupe_a": _without_scalars,
        "rel_scalar": _scalars_alone,
        "abs_scalar": _from_factors,
        "tupe": _other_options,
    }

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `bias_table`: (heads|1, R), and the parameters of `tupe_a`."""
        super().__init__(shape, options)
        self.bias_table = nn.Parameter(torch.zeros(self.table_heads, self.clipped.size))

    def prepare(self, positions: Positions) -> tuple[Any, Tensor]:
        """Return the factors of `tupe_a`, and s in logit units."""
        return super().prepare(positions), self.bias_table * _factor(self)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the product and s, reset together."""
        self.check_length(positions)
        factors, static = prepared
        reset = self.reset_at(positions)
        return (PositionTerms(self.clipped, static=static, position_factors=factors, reset=reset),)


BUCKETS, MAX_DISTANCE = 32, 128  # rel_pos_bins and max_rel_pos
EPSILON = 1e-5


@register_scheme("tupe_released")
class TupeReleased(PositionScheme):
    """Correlations of normalised absolute positions, and bucketed scalars."""

    info = SchemeInfo(
        165, "Ke 2020, released code", "q·k/√(2d) + reset_θ(Q(pᵢ)·K(pⱼ)/√(2d) + s_bucket)", "p, W, s N(0, 0.02); b, θ 0"
    )
    takes = frozenset({SCALE, RESET_CLS, INIT})
    own_scale = 2.0
    absolute = True
    table_limited = True
    resets_by_default = True
    tables = {
        "position_table": Table("max_positions embed_dim", std=0.02, rows="position", has_heads=False),
        "norm_weight": Table("embed_dim", start=1.0, has_heads=False),
        "norm_bias": Table("embed_dim", has_heads=False),
        "query_projection": Table("embed_dim embed_dim", std=0.02, neutral=0.0, grows=WITH_BOTH, flat_heads=True),
        "query_bias": Table("embed_dim", neutral=0.0, grows=WITH_BOTH, flat_heads=True),
        "key_projection": Table("embed_dim embed_dim", std=0.02, flat_heads=True),
        "key_bias": Table("embed_dim", flat_heads=True),
        "bias_table": Table("num_heads distances", std=0.02, rows="distance", neutral=0.0),
    }
    position_table: nn.Parameter  # (max_positions, E)
    norm_weight: nn.Parameter  # (E,), as the other norm's and projections' biases
    norm_bias: nn.Parameter
    query_projection: nn.Parameter  # (E, E)
    query_bias: nn.Parameter
    key_projection: nn.Parameter  # (E, E)
    key_bias: nn.Parameter
    bias_table: nn.Parameter  # (H, buckets)

    @property
    def relation(self) -> Bucketed:
        """T5's buckets, with Ke's number and largest distance."""
        return Bucketed(BUCKETS, MAX_DISTANCE, not self.shape.causal)

    def prepare(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return Q / sqrt(2d) and K of every position that may occur: (H, S, D) each."""
        used = self.position_table[: positions.stop]
        used = F.layer_norm(used, used.shape[1:], self.norm_weight, self.norm_bias, EPSILON)
        query = F.linear(used, self.query_projection, self.query_bias) * self.scale
        key = F.linear(used, self.key_projection, self.key_bias)
        heads = (self.shape.num_heads, -1)
        return query.unflatten(1, heads).transpose(0, 1), key.unflatten(1, heads).transpose(0, 1)

    def terms(self, prepared: tuple[Tensor, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the product and s, reset together."""
        self.check_length(positions)
        reset = self.reset_at(positions)
        return (PositionTerms(self.relation, static=self.bias_table, position_factors=prepared, reset=reset),)
