"""Calls with terms that no scheme has, for tests of the native backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers.scheme_calls import tensors_in
from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Bucketed, Clipped, Folded, Segments
from relpos_fairseq.core.terms import PositionTerms, Reset

Draw = Callable[..., torch.Tensor]


def make_terms(kind: str, dtype: torch.dtype = torch.float64) -> tuple[PositionTerms, ...]:
    """Terms that no scheme has, random, with gradients."""
    generator = torch.Generator().manual_seed(len(kind))
    return kinds(lambda *size: torch.randn(size, generator=generator, dtype=dtype).requires_grad_())[kind]()


def kinds(draw: Draw) -> dict[str, Callable[[], tuple[PositionTerms, ...]]]:
    """What makes the terms of each kind from drawn tensors."""

    def factors(heads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(1, heads, 7, 3), draw(2, 1, 9, 3)

    def reset(heads: int = 1) -> Reset:
        return Reset(draw(heads), draw(heads), torch.tensor([3, 0]))

    clipped, folded, bucketed = Clipped(2, 1), Folded(3), Bucketed(6, 5, True)
    return {
        "several": lambda: (
            PositionTerms(clipped, query_vectors=draw(1, 4, 4), query_offset=draw(2, 4)),
            PositionTerms(folded, query_vectors=draw(2, 3, 4), key_vectors=draw(1, 3, 4)),
            PositionTerms(bucketed, value_vectors=draw(1, 6, 5), static=draw(2, 6)),
            PositionTerms(clipped, value_vectors=draw(2, 4, 5), gate=draw(1, 4)),
            PositionTerms(folded, gate=draw(2, 3), static=draw(1, 3)),
            PositionTerms(static_factors=factors(2)),
            PositionTerms(static_factors=factors()),
        ),
        "offsets": lambda: (PositionTerms(content_offset=draw(2, 4)), PositionTerms(content_offset=draw(1, 4))),
        "gated offset": lambda: (PositionTerms(clipped, gate=draw(1, 4), content_offset=draw(2, 4)),),
        "product": lambda: (
            PositionTerms(clipped, query_vectors=draw(2, 4, 4), key_vectors=draw(1, 4, 4), product=True),
            PositionTerms(folded, trilinear=draw(1, 3, 4)),
            PositionTerms(clipped, key_vectors=draw(1, 4, 4), content_offset=draw(1, 4)),
        ),
        "reset offset": lambda: (
            PositionTerms(clipped, query_vectors=draw(1, 4, 4), query_offset=draw(1, 4), reset=reset(2)),
            PositionTerms(static_factors=factors()),
        ),
        "resets": lambda: (
            PositionTerms(clipped, key_vectors=draw(1, 4, 4), reset=reset()),
            PositionTerms(folded, static=draw(2, 3), static_factors=factors(), reset=reset(2)),
        ),
        "reset factors": lambda: (
            PositionTerms(static_factors=factors(), reset=reset()),
            PositionTerms(static_factors=factors(2)),
            PositionTerms(Segments(2), static=draw(2, 4)),
        ),
        "reset of scalars and factors": lambda: (
            PositionTerms(clipped, static=draw(1, 4), static_factors=factors(), reset=reset()),
            PositionTerms(static_factors=factors(2)),
        ),
        "reset of a term and not of its like": lambda: (
            PositionTerms(
                clipped, static=draw(1, 4), key_vectors=draw(2, 4, 4), static_factors=factors(), reset=reset(2)
            ),
            PositionTerms(folded, query_vectors=draw(1, 3, 4), query_offset=draw(2, 4), key_vectors=draw(1, 3, 4)),
            PositionTerms(bucketed, static=draw(2, 6), value_vectors=draw(1, 6, 5)),
            PositionTerms(static_factors=factors()),
            PositionTerms(Segments(2), static=draw(2, 4)),
        ),
        "reset beside a gated offset": lambda: (
            PositionTerms(clipped, key_vectors=draw(1, 4, 4), content_offset=draw(2, 4), reset=reset()),
            PositionTerms(folded, gate=draw(1, 3), content_offset=draw(1, 4), static=draw(1, 3)),
        ),
        "reset of nothing": lambda: (PositionTerms(clipped, gate=draw(1, 4), reset=reset()),),
    }


ODD = tuple(kinds(torch.zeros))


def make_call(terms: tuple[PositionTerms, ...], **chosen) -> AttentionInputs:
    """A call of seven queries and nine keys, laid out as fairseq does; values are wider."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (7, 2, 2, 4), "k": (9, 2, 2, 4), "v": (9, 2, 2, 5)}
    given = {
        name: torch.randn(size, generator=generator, dtype=torch.float64).permute(1, 2, 0, 3)
        for name, size in sizes.items()
    }
    segments = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1]]).expand(2, -1)
    positions = Positions(7, 9, 2, segments=segments)
    return AttentionInputs(**given, terms=terms, positions=positions, scale=0.6, **chosen)


def parameters_of(terms: tuple[PositionTerms, ...]) -> list[torch.Tensor]:
    """All tensors of terms that have gradients."""
    return [tensor for term in terms for name in term.present for tensor in tensors_in(getattr(term, name))]
