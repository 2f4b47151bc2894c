"""Dai et al. 2019, Transformer-XL (arXiv:1901.02860): section 3.3, and attn_type 1 of the released code.

`transformer_xl`, section 3.3:

    e_ij = [ (q_i + u) . k_j + (q_i + v) . W_R R_{i-j} ] / sqrt(d)

    R -> sinusoid(i - j), fixed;  W_R -> `projection`;  u -> `content_bias`;  v -> `position_bias`

R is computed once a forward pass for all layers, and projected by each, for the T + S - 1 distances
that occur (O(length), never O(length^2)); the result is the term's query_vectors over an unclipped
relation.  R has the released code's layout, [sin(p f_0..), cos(p f_0..)] with f_m = 10000^(-2m/E) and
p = i - j: negative for future keys, which an encoder has and the paper's decoder has not.  Sines are
odd in p and cosines even: W_R R_p and W_R R_{-p} are the sum and the difference of the same two
products of half the width.

The released code can share u and v among layers and keep W_R a layer's own (untie_r=False):
--position-query-bias shared; --position-share layers shares W_R too.  Its clamp_len, past which R no
longer changes, is for inputs longer than those of training.  It starts u and v from N(0, 0.02), ours
start at 0 (--position-init paper starts as it does).  Huang2020 section 3.4 found u and v unstable in
BERT: --position-query-bias off drops them, u or v keeps one.  Huang2020 eq. 10 (Chen2021 section 2.2.2)
projects R by the content's W^K, without W_R: --position-projections content.

`transformer_xl_learned`, attn_type 1 of the released PyTorch code:

    e_ij = [ (q_i + u) . k_j + q_i . a_r + s_r ] / sqrt(d),   r = clip(j - i, -k, k)

    r_emb, a -> `key_table`;  r_w_bias, u -> `content_bias`;  r_bias, s -> `bias_table`

Each layer and head has its own; all start from N(0, 0.02).  The released tables cover segment and
memory (--position-clip-distance 0), or clamp_len, and their oldest row serves further distances.  They
have no rows for future keys, which the released decoder never sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import (
    CLIP_DISTANCE,
    INIT,
    PROJECTIONS,
    RESET_CLS,
    SCALE,
    SHARE,
    Choice,
    Factor,
    Number,
    only,
)
from relpos_fairseq.core.positions import Positions, is_exported, is_transformed
from relpos_fairseq.core.relations import Clipped, sinusoid_of_distance
from relpos_fairseq.core.scheme import (
    WITH_BOTH,
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

QUERY_BIAS = Choice(
    name="query_bias",
    place=80,
    help="u and v: on (a layer's own), shared (by all layers, the released code's untie_r=False), "
    "off, or u or v alone (a layer's own)",
    auto="on",
    choices=("on", "shared", "off", "u", "v"),
)
CLAMP_LEN = Number(
    name="clamp_len",
    prefix="",
    place=100,
    help="distances beyond it read the same sinusoid; 0: none",
    auto=0,
    remembered=False,  # the paper's own evaluation sets it on a model trained without
)

R_DROPOUT = Factor(
    name="r_dropout",
    place=102,
    help="dropout of R in training, the same for all layers, as the released code has; auto: none",
    auto=0.0,
    auto_help="",
    remembered=False,
    training_only=True,
)


class _Projected(torch.autograd.Function):
    """Project R by weights (C, E), for all distances j - i: W R_{i-j} (past + 1 + future, C).

    The two halves of R are kept for the distances 0, 1, ... alone: (p, E/2) sines and cosines.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, sines: Tensor, cosines: Tensor, relation: Clipped) -> Tensor:
        ctx.save_for_backward(sines, cosines)
        ctx.relation, past, half = relation, relation.past, sines.size(1)
        odd, even = sines @ weight[:, :half].t(), cosines @ weight[:, half:].t()  # (p, C)
        out = odd.new_empty(relation.size, odd.size(1))
        torch.add(even[1 : past + 1].flip(0), odd[1 : past + 1].flip(0), out=out[:past])
        torch.sub(even[: relation.future + 1], odd[: relation.future + 1], out=out[past:])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sines, cosines = ctx.saved_tensors
        relation, past = ctx.relation, ctx.relation.past
        grad = grad.to(sines.dtype)
        before, after = grad[:past].flip(0), grad[past:]
        odd, even = grad.new_zeros(2, len(sines), grad.size(1))
        even[: relation.future + 1] = after
        even[1 : past + 1] += before
        odd[: relation.future + 1] = -after
        odd[1 : past + 1] += before
        return torch.cat([odd.t() @ sines, even.t() @ cosines], dim=1), None, None, None


def _other_options(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from other options: report that another clamp_len is equal up to the shorter of the two."""
    old, new = source.old.options.clamp_len, source.new.options.clamp_len
    if old != new:
        source.report.limit(min({old, new} - {0}) + 1, "clamp_len")
    return source.params


@register_scheme("transformer_xl")
class TransformerXL(PositionScheme):
    """Projected sinusoids of the distance, and global content and position biases."""

    info = SchemeInfo(70, "Dai 2019 §3.3", "((q+u)·k + (q+v)·W_R R_{i-j})/√d", "W_R N(0, 0.02); u, v 0; R fixed")
    takes = frozenset({SCALE, SHARE, QUERY_BIAS, RESET_CLS, CLAMP_LEN, INIT, PROJECTIONS, R_DROPOUT})
    default_share = "none"
    elsewhere = {"transformer-xl": "attn_type 0"}
    tables = {
        "projection": Table(neutral=0.0, grows=WITH_K, flat_heads=True),
        "content_bias": Table(neutral=0.0, grows=WITH_Q, meaning="u"),
        "position_bias": Table(neutral=0.0, grows=WITH_Q, meaning="v"),
    }
    convert_from = {"transformer_xl": _other_options}

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for `one` projection, for `content` projections with shared tables, and for a dropout of 1."""
        if options.r_dropout >= 1:
            raise ValueError(f"{R_DROPOUT.flag} must be below 1, got {options.r_dropout:g}")
        only(PROJECTIONS, options.projections, ("own", "content"), cls.name)
        if options.projections == "content" and options.share != "none":
            raise ValueError(
                f"{PROJECTIONS.flag} content: each layer and head has its own projection of keys, "
                f"so {SHARE.flag} must be none, got {options.share}"
            )

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `projection`: (heads*D, E), `content_bias` and `position_bias`: (heads|1, D)."""
        super().__init__(shape, options)
        heads = self.table_heads
        if options.projections == "own":
            self.projection = self.draw(heads * shape.head_dim, shape.embed_dim, std=0.02)
        for name, alone in (("content_bias", "u"), ("position_bias", "v")):
            if options.query_bias in ("on", "shared", alone):
                start = nn.Parameter(torch.zeros(heads, shape.head_dim))
                if options.init == "paper":
                    start = self.draw(heads, shape.head_dim, std=0.02)
                setattr(self, name, start)
        if options.projections == "content":
            self.never_neutral = "the content's projection of R is not zero"

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """Return the names of u and v, where they are shared while W_R is not."""
        return ("content_bias", "position_bias") if self.options.query_bias == "shared" else ()

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and W_R R for each: (heads|1, R, D)."""
        relation = Clipped.unclipped(positions)
        weight = self.projection if self.options.projections == "own" else self.content[1].weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        if is_exported() or is_transformed():  # one sinusoid a distance, without autograd's own function
            offset = -relation.distances(positions.device)
            if self.options.clamp_len:
                offset = offset.clamp(-self.options.clamp_len, self.options.clamp_len)
            waves = sinusoid_of_distance(offset.to(exact), self.shape.embed_dim)
            vectors = waves @ weight.to(exact).t()
        else:
            dropout = self.options.r_dropout * self.training
            key = (self.name, self.shape.embed_dim, self.options.clamp_len, exact, dropout)
            sines_cosines = positions.once(key, lambda: self._waves(relation, exact, positions.device))
            vectors = _Projected.apply(weight.to(exact), *sines_cosines, relation)  # (R, heads*D)
        split = vectors.view(-1, self.table_heads, self.shape.head_dim)
        return relation, split.transpose(0, 1).to(weight.dtype)

    def _waves(self, relation: Clipped, exact: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sines and cosines of R_p for p from 0 to the largest distance: (p, E/2) each."""
        offset = torch.arange(max(relation.past, relation.future) + 1, device=device)
        if self.options.clamp_len:
            offset = offset.clamp(max=self.options.clamp_len)
        dim = self.shape.embed_dim
        waves = sinusoid_of_distance(offset.to(exact), dim)
        if self.training and self.options.r_dropout:
            waves = torch.nn.functional.dropout(waves, self.options.r_dropout)
        return waves[:, : (dim + 1) // 2], waves[:, (dim + 1) // 2 :]

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return (q + v).W_R R and u.k."""
        relation, vectors = prepared
        term = PositionTerms(
            relation=relation,
            query_vectors=vectors,
            query_offset=getattr(self, "position_bias", None),
            content_offset=getattr(self, "content_bias", None),
            reset=self.reset_at(positions),
        )
        return (term,)


@register_scheme("transformer_xl_learned")
class LearnedTransformerXL(PositionScheme):
    """A vector and a scalar a distance, both learned, and a global content bias."""

    info = SchemeInfo(75, "Dai 2019, released attn_type 1", "((q+u)·k + q·aᵣ + sᵣ)/√d", "N(0, 0.02)")
    takes = frozenset({SCALE, CLIP_DISTANCE, SHARE, RESET_CLS, INIT})
    default_share = "none"
    clip = "vectors"
    tables = {
        "key_table": Table("table_heads distances head_dim", std=0.02, rows="distance", neutral=0.0, grows=WITH_K),
        "content_bias": Table("table_heads head_dim", std=0.02, neutral=0.0, grows=WITH_Q, meaning="u"),
        "bias_table": Table("table_heads distances", std=0.02, rows="distance", neutral=0.0, grows=WITH_BOTH),
    }
    elsewhere = {"transformer-xl": "attn_type 1"}
    key_table: nn.Parameter  # (heads|1, R, D)
    content_bias: nn.Parameter  # (heads|1, D)
    bias_table: nn.Parameter  # (heads|1, R)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.a_r, s_r and u.k."""
        term = PositionTerms(
            relation=self.clipped,
            query_vectors=self.key_table,
            content_offset=self.content_bias,
            static=self.bias_table * self.scale,
            reset=self.reset_at(positions),
        )
        return (term,)
