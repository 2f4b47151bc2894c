"""DeBERTa as Microsoft released it (He et al. 2020, arXiv:2006.03654; v3: arXiv:2111.09543).

    e_ij = (q_i . k_j + q_i . W_K a_r + k_j . (W_Q a_r + b)) / sqrt(C d),  C = 1 + number of terms

What differs from 003's form (`deberta`), as in transformers' modeling_deberta and _deberta_v2:

- a -> `table`: 2K vectors of the model's width, one table for all layers and heads; r runs over
  -K+1..K (j - i), for the code clamps i - j to -K..K-1.  K -> --position-clip-distance (0: the
  longest input).  v2 and v3 normalise it (norm_rel_ebd): --position-norm on.
- W_K -> `query_projection` (it meets the query; pos_proj, pos_key_proj), W_Q and b ->
  `key_projection`, `key_bias` (pos_q_proj, pos_query_proj): a layer's own, or the content's
  (share_att_key): --position-projections content.  W_K's bias adds the same to a query's whole row,
  which softmax does not see: left out.
- r may be bucketed, exact near by, coarser further off (position_buckets): --position-log-buckets
  B, up to the distance of --position-clip-distance; K is then B.
- --position-terms c2p or p2c drops the other term (pos_att_type).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.options import CLIP_DISTANCE, INIT, PROJECTIONS, SCALE, Choice, Number, only
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Clipped, LogClipped
from relpos_fairseq.scheme import AttentionShape, PositionScheme, SchemeCard, SchemeOptions, register_scheme
from relpos_fairseq.tables import WITH_K, WITH_Q, Table
from relpos_fairseq.terms import PositionTerms

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

    card = SchemeCard(145, "He 2020, released code", "(q·k + q·W_K aᵣ + k·(W_Q aᵣ + b))/√(3d)", "N(0, 0.02); b 0")
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
    def scale_under(cls, value) -> float:
        """1 + the number of terms."""
        return 3.0 if value(TERMS) == "both" else 2.0

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Refuse one projection, and buckets that are odd or reach no further than distances."""
        only(PROJECTIONS, options.projections, ("own", "content"), cls.name)
        buckets, reach = options.log_buckets, options.clip_distance or shape.max_positions
        if buckets and (buckets < 4 or buckets % 2 or buckets // 2 >= reach - 1):
            raise ValueError(
                f"log_buckets must be an even number from 4 to below {2 * (reach - 1)}, got "
                f"{buckets} ({LOG_BUCKETS.flag}; or raise {CLIP_DISTANCE.flag})"
            )

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`table`: (1, 2K, E); the projections: (E, E); `key_bias`, `norm_...`: (E,)."""
        super().__init__(shape, options)
        width = shape.embed_dim
        self.table = self.draw(1, self.relation.size, width, std=0.02)
        if options.norm == "on":
            self.norm_weight = nn.Parameter(torch.ones(width))
            self.norm_bias = nn.Parameter(torch.zeros(width))
        if options.projections == "content":
            self.never_neutral = "the bias of the queries' projection meets every key"
            return
        if options.terms != "p2c":
            self.query_projection = self.draw(width, width, std=0.02)
        if options.terms != "c2p":
            self.key_projection = self.draw(width, width, std=0.02)
            self.key_bias = nn.Parameter(torch.zeros(width))

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """The vectors of positions and their norm."""
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
        """(R, E) to (H, R, D)."""
        return vectors.unflatten(1, (self.shape.num_heads, -1)).transpose(0, 1)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.(W_K a_r) + k.(W_Q a_r + b)."""
        to_query, to_key = prepared
        return (PositionTerms(relation=self.relation, query_vectors=to_query, key_vectors=to_key),)
