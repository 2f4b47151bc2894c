"""New tables by least squares, so that the new scheme's logits start near the old model's.

`learned -> m4` drops the absolute table.  What it did to the attention logits is fitted, layer by
layer from the input on, by what the new scheme can add.  With z the old model's logits, c what the
new model has without the table (from its own states, which the layers before it gave), and f the
factor that a table's row meets,

    min over a_r  sum over pairs (i, j) of distance r of  (z_ij - c_ij - m_i - f_ij . a_r)^2

m_i is what softmax does not see, the mean of a row.  f is

    shaw_keys, shaw  q_i / sqrt(d)           m4       (q_i + k_j) / sqrt(d)
    rel_scalar, tupe's s  1                  t5       1 / sqrt(d)
    m1, m2           q_i.k_j / sqrt(d)       m3       q_ic k_jc / sqrt(d)
    deberta          (W^R q_i + W^T k_j) / sqrt(3d)

The mean of a dropped absolute table goes into the token embedding: with the output layer tied to
it, every logit of a token grows by the same number, which softmax does not see either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention.formula import logits
from relpos_fairseq.attention.reference import Gathered
from relpos_fairseq.conversion import exact
from relpos_fairseq.conversion.convert import Conversion
from relpos_fairseq.conversion.fidelity import Probe
from relpos_fairseq.conversion.layouts import ENCODER, Place, places
from relpos_fairseq.conversion.report import ConversionError, ConversionReport
from relpos_fairseq.conversion.source import SourceModel, plan_of
from relpos_fairseq.conversion.writer import build
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.schemes import scheme_class, scheme_names

ROUNDS = 3  # of table and row means in turn
RIDGE = 1e-3  # of the mean square of f
MOST = 20_000  # pairs of one row of a table that are looked at
SENTENCES = 4
LONGEST = 512


def fitted_schemes() -> list[str]:
    """Return the names of the schemes with a table that is linear in the logits."""
    return [name for name in scheme_names() if scheme_class(name).fitted]


@torch.no_grad()
def fit(source: SourceModel, values: dict[str, Any], done: Conversion, seed: int) -> Conversion:
    """Fit the tables that the source had nothing for; if there are none, those that it had.

    Args:
        source: the old model.
        values: the new model's config.
        done: the conversion with those tables at neutral values.
        seed: of the random input that both are run on.

    Raises:
        ConversionError: the new scheme has no table that is linear in the logits.
    """
    report = done.report
    target = plan_of(values)
    taken = exact.assign(places(source.plan), places(target))
    linear = [place for place in places(target) if place.scheme.fitted]
    chosen = [place for place in linear if place.name not in taken] or linear
    if not chosen:
        raise ConversionError(
            f"--init fit: {target.name} has no table that is linear in the logits (those of "
            f"{', '.join(fitted_schemes())} are): use --init own or neutral"
        )
    state = dict(done.state)
    _mean_into_tokens(source, values, taken, state, report)
    old = build(source.values, source.state).float()
    new = build(values, state).float()
    longest = min(int(source.values["max_positions"]), int(values["max_positions"]), LONGEST)
    probe = _full(source, longest, seed)
    before = _recorded(old, probe)
    # On a terminal alone: the report says what was fitted.
    for layer in tqdm(range(len(before)), desc="fitting", unit="layer", disable=None):
        wanted = logits(Gathered(before[layer]))
        for place in chosen:
            _fit_layer(new, place, layer, wanted, probe, report)
    made = new.state_dict()
    fitted = {key: made[key].to(value.dtype) for key, value in done.state.items()}
    return Conversion(fitted, report)


def _full(source: SourceModel, longest: int, seed: int) -> Probe:
    """Return random input without padding, as long as the tables."""
    segments = source.plan.segment_encoding != "none" and source.plan.num_segments > 1
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, source.rows, (SENTENCES, longest), generator=random)
    division = torch.zeros_like(tokens)
    division[:, longest // 2 :] = 1
    return Probe(tokens, division if segments else None)


def _mean_into_tokens(
    source: SourceModel,
    values: dict[str, Any],
    taken: dict[str, str],
    state: dict[str, Tensor],
    report: ConversionReport,
) -> None:
    """Add the mean of a dropped table of positions to every token."""
    tables = [
        f"{place.prefix(0)}{name}"
        for place in places(source.plan)
        if place.on_input and place.name not in taken.values()
        for name, table in place.scheme.tables.items()
        if table.rows == "position"
    ]
    if not tables:
        return
    mean = sum(source.state[name].mean(0) for name in tables)
    key = f"{ENCODER}.embed_tokens.weight"
    state[key] = state[key] + mean
    if not values.get("untie_weights_roberta"):
        state["encoder.lm_head.weight"] = state[key]
    report.step("the mean of the dropped positions is added to every token (softmax cancels it)")


@contextlib.contextmanager
def _watching(calls: list[AttentionInputs]) -> Iterator[None]:
    """Remember what every attention is given."""
    from relpos_fairseq.modules import multihead_attention

    attend = multihead_attention.attend

    def watch(inputs: AttentionInputs, *args: Any) -> Any:
        calls.append(inputs)
        return attend(inputs, *args)

    multihead_attention.attend = watch
    try:
        yield
    finally:
        multihead_attention.attend = attend


def _recorded(model: nn.Module, probe: Probe) -> list[AttentionInputs]:
    calls: list[AttentionInputs] = []
    more = {} if probe.segments is None else {"segments": probe.segments}
    with _watching(calls):
        model(probe.tokens, features_only=True, **more)
    return calls


def _fit_layer(
    model: nn.Module,
    place: Place,
    layer: int,
    wanted: Tensor,
    probe: Probe,
    report: ConversionReport,
) -> None:
    """Fit one layer's table where layers have their own, else the one that all share.

    A shared table is fitted to the first layer, whose input is the old model's.
    """
    if place.shared and layer:
        return
    inputs = _recorded(model, probe)[layer]
    encoder = model.encoder.sentence_encoder
    stack = encoder.positions.shared if place.shared else encoder.layers[layer].self_attn.position
    scheme = stack[place.index]
    residual = wanted - logits(Gathered(inputs))
    residual = residual - residual.mean(-1, keepdim=True)
    start = float(residual.square().mean().sqrt())
    table = getattr(scheme, scheme.fitted)
    left = residual
    for _ in range(ROUNDS):
        added, predicted = _solve(inputs, scheme, table, residual)
        offset = (residual - predicted).mean(-1, keepdim=True)
        left, residual = residual - predicted - offset, residual - offset
    table.add_(added.reshape(table.shape))
    where = "all layers" if place.shared else f"layer {layer}"
    report.step(
        f"{place.name} fitted in {where}: attention logits off by {start:.3g} before, "
        f"{float(left.square().mean().sqrt()):.3g} after (root mean square)"
    )


def _solve(
    inputs: AttentionInputs,
    scheme: PositionScheme,
    table: Tensor,
    residual: Tensor,
) -> tuple[Tensor, Tensor]:
    """Solve for the table (H|1, R, D|1); return it and what it adds to logits (B, H, T, T)."""
    ids = scheme.relation.ids(inputs.positions)[0]
    heads, rows = table.size(0), table.size(1)
    found = table.new_zeros(heads, rows, 1 if table.dim() == 2 else table.size(2))
    predicted = torch.zeros_like(residual)
    for row in ids.unique().tolist():
        i, j = (ids == row).nonzero(as_tuple=True)
        used = torch.arange(len(i)) if len(i) <= MOST else torch.randperm(len(i))[:MOST]
        met = scheme.factor(inputs.q[:, :, i[used]], inputs.k[:, :, j[used]])  # (B, H, P, D)
        target = residual[:, :, i[used], j[used]]
        found[:, row] = _least_squares(met, target, heads)
        for chunk in torch.arange(len(i)).split(MOST):
            part = scheme.factor(inputs.q[:, :, i[chunk]], inputs.k[:, :, j[chunk]])
            value = (part * found[:, row][None, :, None]).sum(-1)
            predicted[:, :, i[chunk], j[chunk]] = value
    return found, predicted


def _least_squares(met: Tensor, target: Tensor, heads: int) -> Tensor:
    """Ridge regression a head, or for all: (B, H, P, D) and (B, H, P) to (H|1, D)."""
    groups = met.transpose(0, 1).flatten(1, 2)  # (H, B * P, D)
    wanted = target.transpose(0, 1).flatten(1)[..., None]
    if heads == 1:
        groups, wanted = groups.flatten(0, 1)[None], wanted.flatten(0, 1)[None]
    groups, wanted = groups.double(), wanted.double()
    square = groups.transpose(-1, -2) @ groups
    size = square.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    ridge = torch.eye(square.size(-1), dtype=square.dtype) * (RIDGE * size + 1e-12)
    return torch.linalg.solve(square + ridge, groups.transpose(-1, -2) @ wanted)[..., 0].to(met)
