"""He et al. 2020, DeBERTa (arXiv:2006.03654): `deberta` as M4M writes it, `deberta_released` as released.

`deberta`, M4M eq. 7:

    e_ij = (q_i . k_j + q_i . (a_r W^R) + k_j . (a_r W^T)) / sqrt(3d),  r = clip(j - i, -k, k)

    a -> `table`, W^R -> `query_projection`, W^T -> `key_projection`

He's text reads the key's term by delta(j, i), its released code by delta(i, j), as the query's term.
M4M too reads the same a_r in both: --position-p2c-index same, the default; mirrored takes a_{-r} in the key's
term, as He's text.  In M4M heads share a (of size d) and one
W of d x d (its Table 5 counts one, which is --position-projections one; eq. 7 has two, and so has our
default).  Released DeBERTa drops the biases of the content's projections and shares W with them:
`deberta` does neither.

`deberta_released`, as Microsoft released it (v3: arXiv:2111.09543; transformers' modeling_deberta and
_deberta_v2):

    e_ij = (q_i . k_j + q_i . W_K a_r + k_j . (W_Q a_r + b)) / sqrt(C d),  C = 1 + number of terms

- a -> `table`: 2K vectors of the model's width, one table for all layers and heads; r runs over
  -K+1..K (j - i), for the code clamps i - j to -K..K-1.  K -> --position-clip-distance (0: the
  longest input).  v2 and v3 normalise it (norm_rel_ebd): --position-norm on.
- W_K -> `query_projection` (it multiplies the query; pos_proj, pos_key_proj), W_Q and b ->
  `key_projection`, `key_bias` (pos_q_proj, pos_query_proj): a layer's own, or the content's
  (share_att_key): --position-projections content.  W_K's bias adds one number to a query's whole row,
  which softmax ignores: it is left out.
- r may be bucketed: exact for near distances, logarithmic beyond (position_buckets):
  --position-log-buckets B, up to the distance of --position-clip-distance; K is then B.
- --position-terms c2p or p2c drops the other term (pos_att_type).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.core.options import (
    CLIP_DISTANCE,
    INIT,
    PROJECTIONS,
    RESET_CLS,
    SCALE,
    SHARE,
    Choice,
    Number,
    Option,
    only,
)
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped, LogClipped
from relpos_fairseq.core.scheme import (
    WITH_K,
    WITH_Q,
    AttentionShape,
    ConversionSource,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.core.terms import PositionTerms

P2C_INDEX = Choice(
    name="p2c_index",
    place=90,
    help="row of the key's term: same (a_r as the query's: M4M and DeBERTa's released code) or "
    "mirrored (a_{-r}: the equation in DeBERTa's paper)",
    auto="same",
    auto_help="same",
    choices=("same", "mirrored"),
)


def _from_keys_alone(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from shaw_keys: W^R = 1, W^T = 0."""
    table = source.remap_table("key_table")
    one = source.identities(table)
    if source.new.options.projections == "one":
        source.report.lose("deberta: one projection multiplies keys as well as queries")
        return source.reset() | {"table": table, "projection": one}
    made = {"table": table, "query_projection": one, "key_projection": one * 0}
    return source.reset() | made


def _from_one_table(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from m4: W^R = W^T = 1, where both terms read the same row."""
    table = source.remap_table("table")
    one = source.identities(table)
    if source.new.options.p2c_index == "mirrored" and not torch.equal(table, table.flip(1)):
        source.report.lose("deberta: the mirrored key term reads a_{-r}, where m4 reads a_r")
    names = [name for name, _ in source.new.named_parameters() if "projection" in name]
    return source.params | {"table": table} | dict.fromkeys(names, one)


def _other_options(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from other options: report that another p2c index reads the key term's table mirrored."""
    old, new = source.old.options.p2c_index, source.new.options.p2c_index
    table = source.params["table"]
    if old != new and not torch.equal(table, table.flip(1)):
        source.report.lose(f"deberta: p2c index {old} -> {new} reads the key term's table in the other direction")
    return source.params


@register_scheme("deberta")
class Deberta(PositionScheme):
    """Content to position and position to content, each through its own projection."""

    info = SchemeInfo(
        140,
        "He 2020; M4M eq. 7",
        "(q·k + q·(aᵣW^R) + k·(aᵣW^T))/√(3d)",
        "a N(0, 0.02), W N(0, 1/d)",
        published="834K (M4M Table 5)",
        difference="M4M counts one of the two projections of its eq. 7",
    )
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, RESET_CLS, P2C_INDEX, INIT, PROJECTIONS})
    own_scale = 3.0
    default_share = "heads"
    clip = "vectors"
    # Neutral by a = 0 alone, so that gradients still reach every table.
    tables = {
        "table": Table(rows="distance", neutral=0.0),
        "query_projection": Table(grows=WITH_K),
        "key_projection": Table(grows=WITH_Q),
        "projection": Table(grows=WITH_K, multiplies_both=True, copies=("query_projection", "key_projection")),
    }
    convert_from = {"shaw_keys": _from_keys_alone, "m4": _from_one_table, "deberta": _other_options}
    query_projection: nn.Parameter
    key_projection: nn.Parameter
    projection: nn.Parameter

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for `content` projections: they take the model's width, and this table has a head's width."""
        only(PROJECTIONS, options.projections, ("own", "one"), cls.name)

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `table`: (heads|1, R, D), and two projections or one: (heads|1, D, D)."""
        super().__init__(shape, options)
        heads, dim = self.table_heads, shape.head_dim
        self.table = self.draw(heads, self.clipped.size, dim, std=0.02)
        one = options.projections == "one"
        for name in ("projection",) if one else ("query_projection", "key_projection"):
            setattr(self, name, self.draw(heads, dim, dim, std=dim**-0.5))

    def _projections(self) -> tuple[Tensor, Tensor]:
        """Return W^R and W^T."""
        if self.options.projections == "one":
            return self.projection, self.projection
        return self.query_projection, self.key_projection

    def prepare(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return A W^R and A W^T (mirrored where asked): (heads|1, R, D) each."""
        to_query, to_key = (self.table @ projection for projection in self._projections())
        if self.options.p2c_index == "mirrored":
            to_key = to_key.flip(1)
        return to_query, to_key

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.(a_r W^R) + k.(a_r W^T)."""
        to_query, to_key = prepared
        term = PositionTerms(
            relation=self.clipped, query_vectors=to_query, key_vectors=to_key, reset=self.reset_at(positions)
        )
        return (term,)


LOG_BUCKETS = Number(
    name="log_buckets", place=65, help="number of buckets of each direction, an even one; 0: none", auto=0
)
TERMS = Choice(
    name="terms",
    place=92,
    help="c2p (queries' alone), p2c (keys' alone) or both",
    auto="both",
    choices=("both", "c2p", "p2c"),
)
NORM = Choice(name="norm", place=94, help="layer norm of the vectors of positions: on or off", auto="off")
EPSILON = 1e-7  # layer_norm_eps of the released models


@register_scheme("deberta_released")
class DebertaReleased(PositionScheme):
    """One table of the model's width for all layers, which projections bring to every head."""

    info = SchemeInfo(145, "He 2020, released code", "(q·k + q·W_K aᵣ + k·(W_Q aᵣ + b))/√(3d)", "N(0, 0.02); b 0")
    takes = frozenset({SCALE, CLIP_DISTANCE, INIT, PROJECTIONS, LOG_BUCKETS, TERMS, NORM})
    own_scale = 3.0
    default_share = "none"
    clip = "vectors"
    tables = {
        "table": Table(rows="distance", neutral=0.0, has_heads=False),
        "query_projection": Table(grows=WITH_K, flat_heads=True),
        "key_projection": Table(grows=WITH_Q, flat_heads=True),
        "key_bias": Table(neutral=0.0, grows=WITH_Q, flat_heads=True),
        "norm_weight": Table(has_heads=False),
        "norm_bias": Table(neutral=0.0, has_heads=False),
    }

    elsewhere = {"transformers' model_type": "deberta"}

    @classmethod
    def scale_under(cls, value: Callable[[Option], Any]) -> float:
        """Return C = 1 + the number of terms."""
        return 3.0 if value(TERMS) == "both" else 2.0

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for `one` projection, and for a number of buckets that is odd, too small or too large."""
        only(PROJECTIONS, options.projections, ("own", "content"), cls.name)
        buckets, reach = options.log_buckets, options.clip_distance or shape.max_positions
        if buckets and (buckets < 4 or buckets % 2 or buckets // 2 >= reach - 1):
            raise ValueError(
                f"log_buckets must be an even number from 4 to below {2 * (reach - 1)}, got "
                f"{buckets} ({LOG_BUCKETS.flag}; or raise {CLIP_DISTANCE.flag})"
            )

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `table`: (1, 2K, E), the projections: (E, E), `key_bias` and `norm_...`: (E,)."""
        super().__init__(shape, options)
        width = shape.embed_dim
        self.table = self.draw(1, self.relation.size, width, std=0.02)
        if options.norm == "on":
            self.norm_weight = nn.Parameter(torch.ones(width))
            self.norm_bias = nn.Parameter(torch.zeros(width))
        if options.projections == "content":
            self.never_neutral = "the bias of the queries' projection multiplies every key"
            return
        if options.terms != "p2c":
            self.query_projection = self.draw(width, width, std=0.02)
        if options.terms != "c2p":
            self.key_projection = self.draw(width, width, std=0.02)
            self.key_bias = nn.Parameter(torch.zeros(width))

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """Return the names of the vectors of positions and their norm."""
        return ("table", *(("norm_weight", "norm_bias") if self.options.norm == "on" else ()))

    @property
    def relation(self) -> Clipped | LogClipped:
        """Distances -K+1..K, or their buckets."""
        reach = self.options.clip_distance or self.shape.max_positions
        if self.options.log_buckets:
            return LogClipped(2 * self.options.log_buckets, reach)
        return Clipped(reach - 1, reach)

    def prepare(self, positions: Positions) -> tuple[Tensor | None, Tensor | None]:
        """Return W_K a and W_Q a + b: (H, 2K, D) each, or None."""
        vectors = self.table[0]
        if self.options.norm == "on":
            norm = (self.norm_weight, self.norm_bias)
            vectors = F.layer_norm(vectors, norm[0].shape, *norm, EPSILON)
        weights: tuple[Any, ...]
        if self.options.projections == "content":
            q_proj, k_proj = self.content
            weights = (k_proj.weight, q_proj.weight, q_proj.bias)
        else:
            names = ("query_projection", "key_projection", "key_bias")
            weights = tuple(getattr(self, name, None) for name in names)
        to_query = to_key = None
        if self.options.terms != "p2c":
            to_query = self._heads(F.linear(vectors, weights[0]))
        if self.options.terms != "c2p":
            to_key = self._heads(F.linear(vectors, *weights[1:]))
        return to_query, to_key

    def _heads(self, vectors: Tensor) -> Tensor:
        """Split vectors (R, E) by head: (H, R, D)."""
        return vectors.unflatten(1, (self.shape.num_heads, -1)).transpose(0, 1)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.(W_K a_r) + k.(W_Q a_r + b)."""
        to_query, to_key = prepared
        return (PositionTerms(relation=self.relation, query_vectors=to_query, key_vectors=to_key),)
