"""Dai et al. 2019, Transformer-XL (arXiv:1901.02860), section 3.3 (002).

    e_ij = [ (q_i + u) . k_j + (q_i + v) . W_R R_{i-j} ] / sqrt(d)

    R -> sinusoid(i - j), fixed;  W_R -> `projection`;  u -> `content_bias`;  v -> `position_bias`

R is formed once a forward pass for all layers, and projected by each, for the T + S - 1 distances
that occur (O(length), never O(length^2)); the result is the term's query_vectors over an unclipped
relation.  R has the released code's layout, [sin(p f_0..), cos(p f_0..)] with
f_m = 10000^(-2m/E) and p = i - j: negative for future keys, which an encoder has and the paper's
decoder has not.  The released code can tie u and v across layers and keep W_R a layer's own
(untie_r=False): --position-query-bias shared; --position-share layers ties W_R too.  Its
clamp_len, past which R no longer changes, is for inputs longer than those of training.  It starts
u and v from N(0, 0.02), we from 0.
000 section 3.4 found u and v unstable in BERT: --position-query-bias off drops them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Clipped
from relpos_fairseq.scheme import (
    AttentionShape,
    PositionScheme,
    SchemeCard,
    SchemeOptions,
    register_scheme,
)
from relpos_fairseq.terms import PositionTerms


def sinusoid_of_distance(offset: Tensor, dim: int) -> Tensor:
    """R of (N,) offsets i - j: (N, dim) as the released code lays it out, at least fp32."""
    exact = offset.dtype if offset.dtype == torch.float64 else torch.float32
    channel = torch.arange(0, dim, 2, device=offset.device, dtype=exact)
    angle = offset.to(exact)[:, None] * 10000 ** (-channel / dim)  # (N, ceil(dim/2))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :dim]


@register_scheme("transformer_xl")
class TransformerXL(PositionScheme):
    """Projected sinusoids of the distance, and global content and position biases."""

    card = SchemeCard(
        "Dai 2019 §3.3; 002", "((q+u)·k + (q+v)·W_R R_{i-j})/√d", "W_R N(0, 0.02); u, v 0; R fixed"
    )
    takes = frozenset({"scale", "share", "query_bias", "reset_cls", "clamp_len"})
    default_share = "none"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`projection`: (heads*D, E); `content_bias`, `position_bias`: (heads|1, D)."""
        super().__init__(shape, options)
        heads = self.table_heads
        self.projection = self.draw(heads * shape.head_dim, shape.embed_dim, std=0.02)
        if options.query_bias != "off":
            self.content_bias = nn.Parameter(torch.zeros(heads, shape.head_dim))
            self.position_bias = nn.Parameter(torch.zeros(heads, shape.head_dim))

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """Biases u and v, where they are shared while W_R is not."""
        return ("content_bias", "position_bias") if self.options.query_bias == "shared" else ()

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """The relation over the distances that occur, and W_R R: (heads|1, R, D)."""
        relation = Clipped(-positions.lowest_distance, max(positions.highest_distance, 0))
        weight = self.projection
        key = (self.name, self.shape.embed_dim, self.options.clamp_len, weight.dtype)
        waves = positions.once(key, lambda: self._waves(relation, positions))
        vectors = waves @ weight.t()  # (R, heads*D)
        split = vectors.view(relation.size, self.table_heads, self.shape.head_dim)
        return relation, split.transpose(0, 1)

    def _waves(self, relation: Clipped, positions: Positions) -> Tensor:
        """R of the relation's distances in the weights' type: (R, E)."""
        distance = torch.arange(-relation.past, relation.future + 1, device=positions.device)
        if self.options.clamp_len:
            distance = distance.clamp(-self.options.clamp_len, self.options.clamp_len)
        dtype = self.projection.dtype
        offset = -distance.double() if dtype == torch.float64 else -distance
        return sinusoid_of_distance(offset, self.shape.embed_dim).to(dtype)

    def terms(
        self, prepared: tuple[Clipped, Tensor], positions: Positions
    ) -> tuple[PositionTerms, ...]:
        """(q + v).W_R R and u.k."""
        relation, vectors = prepared
        biased = self.options.query_bias != "off"
        term = PositionTerms(
            relation=relation,
            query_vectors=vectors,
            query_offset=self.position_bias if biased else None,
            content_offset=self.content_bias if biased else None,
            reset=self.reset_at(positions),
        )
        return (term,)
