"""One model's tensors under another position scheme.

    state (fairseq's names) -> split -> fold the scale -> for each member of the target: what it
    takes over from a member of the source, or its start -> spread over heads and layers -> join

Every rule says what it loses; a conversion is exact when nothing was lost.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from relpos_fairseq.conversion import approximate, exact, scales
from relpos_fairseq.conversion.heads import merge_layers, spread_heads
from relpos_fairseq.conversion.layouts import (
    ENCODER,
    Params,
    Place,
    State,
    Tables,
    count_layers,
    join,
    places,
    places_of,
    split,
)
from relpos_fairseq.conversion.lengths import resize
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError
from relpos_fairseq.plan import PositionPlan
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.takeover import Takeover

STARTS = ("neutral", "own")


@dataclass(frozen=True)
class Conversion:
    """A converted state, and what happened to it."""

    state: State
    report: ConversionReport


@torch.no_grad()
def convert(
    state: State,
    source: PositionPlan,
    target: PositionPlan,
    *,
    allow_loss: bool = False,
    start: str = "neutral",
    fill: str | None = None,
) -> Conversion:
    """Say what a model knows of positions in another scheme's tables.

    Args:
        state: the model, under fairseq's names, with our positions (`layouts`).
        source: the positions that it was trained with.
        target: the positions that it shall have.
        allow_loss: whether what the target cannot express may be dropped.
        start: where tables that the source has nothing for begin: `neutral` (they change nothing,
            where the scheme can) or `own` (the scheme's initial values).
        fill: `tile` or `interpolate`: how absolute positions beyond the source's are filled.

    Raises:
        NotExactError: something would be lost and `allow_loss` is off; names all of it.
        ConversionError: the state does not fit `source`.
        ValueError: unknown `start` or `fill`, or more positions are wanted and `fill` is None.
    """
    if start not in STARTS:
        raise ValueError(f"tables start at one of {', '.join(STARTS)}, got {start}")
    report = ConversionReport(source.describe(), target.describe())
    content, tables = split(state, source)
    content, tables = scales.fold(content, tables, source, target, report)
    work = _Work(source, target, tables, report, start, fill, count_layers(content))
    made, fresh = work.members()
    work.report_unused()
    if report.losses and not allow_loss:
        raise NotExactError(
            f"{source.name} -> {target.name} is not exact: {'; '.join(report.lost)}. Convert "
            f"approximately (--approximate) or choose a target that keeps it",
            "; ".join(report.lost),
        )
    content = _projections(content, fresh, report)
    content = _mean_into_tokens(content, work.dropped_positions(), report)
    dtype = next(value.dtype for value in content.values() if value.is_floating_point())
    for params in itertools.chain(*made.values()):
        params.update({name: value.to(dtype) for name, value in params.items()})
    return Conversion(join(content, made, target), report)


class _Work:
    """One conversion under way."""

    def __init__(
        self,
        source: PositionPlan,
        target: PositionPlan,
        tables: Tables,
        report: ConversionReport,
        start: str,
        fill: str | None,
        layers: int,
    ) -> None:
        self.source, self.target, self.tables = source, target, tables
        self.report, self.start, self.fill, self.layers = report, start, fill, layers
        self.old = {place.name: place for place in places(source)}
        self.new = places(target)
        self.taken = [exact.assign(places_of(source, layer), places_of(target, layer)) for layer in range(layers)]

    def members(self) -> tuple[Tables, list[tuple[int, PositionScheme]]]:
        """Make the tables of every member of the target.

        Returns:
            The tables, and (layer, scheme) of those that the source had nothing for.
        """
        made: Tables = {}
        fresh = []
        for place in self.new:
            rows = []
            for layer in range(1 if place.on_input else self.layers):
                if place.index(layer) is None:
                    rows.append({})
                    continue
                scheme = place.build(self.target, layer)
                if place.name in self.taken[layer]:
                    params = self._taken_over(place, scheme, layer)
                else:
                    params = self._started(scheme)
                    fresh.append((layer, scheme))
                rows.append(_checked(spread_heads(params, scheme, self.report), scheme))
            if not place.on_input:
                names = tuple(name for name, _ in scheme.named_parameters())
                alike = names if place.shared else scheme.common_parameters
                rows = merge_layers(rows, alike, place.name, self.report)
            made[place.name] = rows
        return made, fresh

    def _taken_over(self, place: Place, new: PositionScheme, layer: int) -> Params:
        name = self.taken[layer][place.name]
        old = self.old[name].build(self.source, layer)
        params = self._resized(old, self.tables[name][layer])
        if name != place.name:
            self.report.step(f"{name} as {place.name}")
        source = Takeover(params, old, new, self.report)
        return approximate.complete(exact.take_over(source), source)

    def _resized(self, scheme: PositionScheme, params: Params) -> Params:
        """Give tables of absolute positions the target's length."""
        length = self.target.shape.max_positions
        resized = {
            name: resize(params[name], length, self.fill, self.report, table.axis)
            for name, table in scheme.tables.items()
            if table.rows == "position"
        }
        return params | resized

    def _started(self, scheme: PositionScheme) -> Params:
        values = exact.neutral(scheme)
        if values is not None and self.start == "neutral":
            if values:
                self.report.step(f"{scheme.name} added at neutral values")
            return values
        reason = scheme.never_neutral or "--init own"
        self.report.lose(f"{scheme.name} starts at its own initial values ({reason})")
        return {name: value.detach().clone() for name, value in scheme.named_parameters()}

    def dropped_positions(self) -> list[Tensor]:
        """Return the mean (E,) of every table that was added to the input and is left out."""
        return [
            self.tables[name][0][table].mean(0)
            for name, place in self.old.items()
            if place.on_input and name not in self.taken[0].values()
            for table, told in place.scheme.tables.items()
            if told.rows == "position"
        ]

    def report_unused(self) -> None:
        """Say which members of the source the target leaves out."""
        for name, place in self.old.items():
            unused = [
                (place.build(self.source, layer), params)
                for layer, params in enumerate(self.tables[name])
                if place.index(layer) is not None and name not in self.taken[layer].values()
            ]
            if all(exact.is_neutral(scheme, params) for scheme, params in unused):
                if any(params for _, params in unused):
                    self.report.step(f"{name} left out (its tables are neutral)")
                continue
            self.report.lose(approximate.dropped(name, [params for _, params in unused]))


def _checked(params: Params, scheme: PositionScheme) -> Params:
    for name, parameter in scheme.named_parameters():
        if params[name].shape != parameter.shape:
            raise ConversionError(
                f"{scheme.name}: {name} came out as {tuple(params[name].shape)}, and the target "
                f"needs {tuple(parameter.shape)}: the models' sizes differ"
            )
    return params


def _mean_into_tokens(content: State, means: list[Tensor], report: ConversionReport) -> State:
    """Add the mean of what positions added to every token; each logit then grows alike."""
    if not means:
        return content
    tokens, output = f"{ENCODER}.embed_tokens.weight", "encoder.lm_head.weight"
    added = content[tokens] + sum(means).to(content[tokens])
    report.step("the mean of the dropped positions is added to every token (softmax cancels it)")
    tied = output in content and torch.equal(content[output], content[tokens])
    return content | {tokens: added} | ({output: added} if tied else {})


def _projections(content: State, fresh: list[tuple[int, PositionScheme]], report: ConversionReport) -> State:
    """Add what a new scheme wants in the biases of q and k (M4M) to those that there are."""
    content = dict(content)
    for layer, scheme in fresh:
        width = scheme.shape.embed_dim
        wanted = {"q_proj": nn.Linear(1, width), "k_proj": nn.Linear(1, width)}
        for projection in wanted.values():
            projection.bias.zero_()
        scheme.initialize_projections(*wanted.values())
        for name, projection in wanted.items():
            if projection.bias.any():
                key = f"{ENCODER}.layers.{layer}.self_attn.{name}.bias"
                content[key] = content[key] + projection.bias.to(content[key])
                report.step(f"biases of q and k shifted as {scheme.name} starts")
    return content
