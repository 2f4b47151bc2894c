"""Compare the attention of a converted model with its source's, layer by layer, on random input.

The rules of a conversion reason about schemes; this asks the numbers, whatever schemes and options there are, before
anything is called exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import ENCODER, State, count_layers
from relpos_fairseq.conversion.report import EOS, EXACT, FIRST, PADDING, ConversionError, Probe
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.plan import PositionPlan
from relpos_fairseq.nn.self_attention import SelfAttention


@torch.no_grad()
def largest_difference(before: State, source: PositionPlan, after: State, target: PositionPlan, longest: int) -> float:
    """Return how far the layers' attention is from the source's, in parts of its largest value; 0 where rounding is.

    Args:
        before: the source, under fairseq's names.
        source: its positions.
        after: the result.
        target: its positions.
        longest: of inputs for which both are to be equal, in tokens.

    Raises:
        ConversionError: a layer's self-attention lacks a tensor, or has one of another shape.
    """
    probe = Probe.draw(FIRST + 1, longest, segments=True, batch=2)
    known = min((plan.num_segments for plan in (source, target) if plan.segment_encoding != "none"), default=1)
    if probe.segments is not None:
        probe = replace(probe, segments=probe.segments.clamp(max=known - 1))
    pairs = zip(_attended(before, source, probe), _attended(after, target, probe), strict=True)
    found = torch.stack([(one - other).abs().max() / one.abs().max().clamp(min=1e-30) for one, other in pairs])
    return 0.0 if bool((found <= EXACT).all()) else float(found.max())  # NaN where one is


def _attended(state: State, plan: PositionPlan, probe: Probe) -> Iterator[Tensor]:
    """Yield what every layer's heads find among random embeddings of the probe's tokens (N, E), in fp64."""
    shape = plan.shape
    placement = Placement(plan)
    own = {"scheme_version": placement.scheme_version}  # which a plain RoBERTa has not
    placement.load_state_dict(own | _below(f"{ENCODER}.positions.", state))
    placement.double().eval()
    segments = None if plan.segment_encoding == "none" else probe.segments
    added, context = placement.of(probe.tokens, PADDING, EOS, segments=segments)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(*probe.tokens.shape, shape.embed_dim, generator=random, dtype=torch.float64)
    x = (x if added is None else x + added.double()).transpose(0, 1)
    for layer in range(count_layers(state)):
        schemes, scale = placement.layer_schemes(layer), plan.of_layer(layer).scale
        with torch.device("meta"):  # the projections, which begin as the state's
            attention = SelfAttention(shape.embed_dim, shape.num_heads, schemes, scale)
        prefix = f"{ENCODER}.layers.{layer}.self_attn."
        try:
            lacking = attention.load_state_dict(_below(prefix, state), strict=False, assign=True).missing_keys
        except RuntimeError as error:
            raise ConversionError(f"the tensors do not fit: {prefix}: {str(error).splitlines()[-1].strip()}") from error
        if lacking:
            raise ConversionError(f"the tensors do not fit: there is no {prefix}{lacking[0]}")
        found, _ = attention.double().eval().heads(x, context.of_layer(layer), ~probe.real)
        yield found.view(x.shape)[probe.real.t()]


def _below(prefix: str, state: State) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
