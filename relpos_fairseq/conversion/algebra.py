"""Convert tensors from one position scheme to another: exactly where a rule exists, else with losses named.

    state (fairseq's names) -> split -> fold the scale -> for each member of the target: the parameters that a rule
      makes of a member of the source, or initial values -> spread over heads and layers -> join

Every rule reports what it loses; a conversion is exact when nothing was lost. The rules stand in the schemes' own files
(`convert_from`, `tables`). For one layer, with q, k the projections, r = clip(j - i), and C the constant of the
target's scale 1/sqrt(C d), to which the source has been brought (`reshaping.fold`):

    same scheme      tables are read again by the target's relation (`remap_table`): a larger clip
                     repeats the ends, which is what clipping does; heads or layers that shared a
                     table get copies of it
    shaw_keys -> shaw        a^V = 0
    m1 -> m2                 w_r = w_|r|
    m1, m2 -> m3             w_{r,c} = w_r: sum_c q_c k_c w_r = (q.k) w_r
    t5 -> rel_scalar         s'_r = s_bucket(r) / sqrt(C d)
    shaw_keys -> deberta     W^R = 1, W^T = 0
    m4 -> deberta            W^R = W^T = 1 (where both read the same row)
    tupe_a -> tupe           s = 0
    rel_scalar -> tupe       U^Q = 0 (without reset, unless both reset)
    abs_scalar -> tupe_a, tupe    p = P, U^Q = sqrt(C d), U^K = 1, where P's rank is at most d
    sinusoidal -> learned    w_i = the sinusoid at i, up to the table's length
    alibi -> alibi_learned   log m, where both are symmetric
    alibi -> fox             w = 0, b = -log(e^m - 1)
    alibi -> cable           w = u = 0, b = m, c = log(e - 1)
    rope -> rope             other angles by length: exact up to the trained length
    rope -> xpos             s = 0: no decay
    anything -> anything+X   X at its neutral values (`Table.neutral`): it adds 0 or multiplies by 1

Neutral values are chosen so that gradients still reach every table that should learn: DeBERTa's a
and TUPE's U^Q are zero, not their other factor.  M4M, RoPE, xPos, PoPE, ALiBi, KERPLE and others
(`never_neutral`) change the logits whatever their parameters; abs_scalar's P = 0 is neutral but a
point from which it never moves.

Where the algebra does not nest, `fit_to_target` drops or adds parameters that the target's options drop or add, and a
member that the target cannot express is dropped: `learned -> m4`, the papers' near drop-in, drops the absolute table.
How far the logits move is measured afterwards (`report.compare`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from relpos_fairseq.conversion import layouts, reshaping
from relpos_fairseq.conversion.attention_check import largest_difference
from relpos_fairseq.conversion.layouts import ENCODER, Params, Place, State, Tables, places, places_of
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError
from relpos_fairseq.conversion.reshaping import merge_layers, resize, spread_heads
from relpos_fairseq.core.options import CLIP_DISTANCE, RANDOM_RANGE, RESET_CLS, SCALAR_GAIN, SCALE, SHARE, in_order
from relpos_fairseq.core.plan import PositionPlan
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme

STARTS = ("neutral", "own")
# Options of many schemes, which the rules above account for, or which act in training alone: named only where no other
# option differs.
ACCOUNTED = {SCALE, SCALAR_GAIN, SHARE, CLIP_DISTANCE, RESET_CLS, RANDOM_RANGE}


def neutral_parameters(scheme: PositionScheme) -> Params | None:
    """Return parameters at which `scheme` changes nothing, which it then has, or None where there are none."""
    if scheme.never_neutral:
        return None
    scheme.start_neutral()
    return {name: value.detach().clone() for name, value in scheme.named_parameters()}


def apply_rule(source: ConversionSource) -> Params:
    """Return the parameters of the target that a rule makes of the source's parameters."""
    old, new = source.old, source.new
    if old.name != new.name:
        return new.convert_from[old.name](source)
    made = dict(source.params)
    for name in source.params:
        table = old.table_of(name)
        if table.rows == "distance":
            made[name] = source.remap_table(name)
        if table.copies and set(table.copies) <= new._parameters.keys():
            made |= dict.fromkeys(table.copies, made.pop(name))
    return made


def match_members(sources: list[Place], targets: list[Place]) -> dict[str, str]:
    """Map members of the target to the members of the source from which they are converted, by name.

    A member of the same name comes first, then the schemes in `convert_from`.
    """
    names = [place.name for place in sources]
    taken = {place.name: place.name for place in targets if place.name in names}
    by_row = sorted(targets, key=lambda place: card.row if (card := getattr(place.scheme, "info", None)) else 0)
    for place in by_row:
        for source in place.scheme.convert_from:
            if source in names and source not in taken.values() and place.name not in taken:
                taken[place.name] = source
    return taken


def fit_to_target(params: Params, source: ConversionSource) -> Params:
    """Add and drop parameters as the target's options require, after a rule was applied.

    Parameters that the options add start at their neutral values, or the scheme's own where a `Table` has none; those
    that they drop are reported as lost if they are not neutral.

    Args:
        params: parameters that a rule returned.
        source: the source of the rule.
    """
    old, new, report = source.old, source.new, source.report
    wanted = dict(new.named_parameters())
    silent = old.is_neutral(source.params)
    for name in wanted.keys() - params.keys():
        if name == "theta" and not silent:
            report.lose(f"{new.name}: the reset takes the first token's row and column")
    added = {}
    for name in wanted.keys() - params.keys():
        neutral = new.table_of(name).neutral
        added[name] = wanted[name].detach() if neutral is None else torch.full_like(wanted[name], neutral)
    for name, value in params.items():
        if name not in wanted and (bool(value.any()) or (name == "theta" and not silent)):
            meaning = old.table_of(name).meaning or name
            report.lose(f"{new.name}: {meaning} of {old.name} is dropped")
    result = {name: value for name, value in params.items() if name in wanted} | added
    if old.name == new.name and new.name in new.convert_from:
        result = new.convert_from[new.name](replace(source, params=result))
    return result


def describe_dropped(name: str, layers: list[Params]) -> str:
    """Describe a member that is left out by the size of its tables, for the report."""
    tables = [value for params in layers for value in params.values()]
    if not tables:
        return f"{name} is dropped (it has no parameters, and acts all the same)"
    numbers = sum(value.numel() for value in tables)
    rms = (sum(float(v.double().square().sum()) for v in tables) / numbers) ** 0.5
    return f"{name} is dropped ({numbers:,} numbers of root mean square {rms:.3g})"


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion: the converted state dict, and the report."""

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
    """Convert a model's state from one position scheme to another.

    Args:
        state: the model, under fairseq's names, with our positions (`layouts`).
        source: the positions that it was trained with.
        target: the positions of the result.
        allow_loss: whether what the target cannot express may be dropped.
        start: initial values of members without a counterpart in the source: `neutral` (they change
            nothing, where the scheme can) or `own` (the scheme's own).
        fill: `tile` or `interpolate`: how absolute positions beyond the source's are filled.

    Raises:
        NotExactError: something would be lost and `allow_loss` is off; names all of it.
        ConversionError: the state does not fit `source`, or 16 bits do not hold the result.
        ValueError: unknown `start` or `fill`, or more positions are wanted and `fill` is None.
    """
    if start not in STARTS:
        raise ValueError(f"tables start at one of {', '.join(STARTS)}, got {start}")
    report = ConversionReport(source.describe(), target.describe())
    types = {key: value.dtype for key, value in state.items()}
    state = _cast(state, {key: _exact(dtype) for key, dtype in types.items()})
    content, tables = layouts.split(state, source)
    content, tables = reshaping.fold(content, tables, source, target, report)
    work = _Work(source, target, tables, report, start, fill, layouts.count_layers(content))
    for plan in (source, target):
        plan.check_layers(work.layers)
    made, fresh = work.members()
    work.report_unused()
    _refuse_losses(report, source, target, allow_loss)
    content = _shift_projections(content, fresh, report)
    content = _mean_into_tokens(content, work.dropped_positions(), report)
    dtype = types[f"{ENCODER}.layers.0.self_attn.q_proj.weight"]  # of new tables
    for params in itertools.chain(*made.values()):
        params.update({name: value.to(_exact(dtype)) for name, value in params.items()})
    result = layouts.join(content, made, target) | work.versions(state)
    if report.exact and source != target:
        longest = min(source.shape.max_positions, target.shape.max_positions)
        moved = largest_difference(state, source, result, target, min(longest, report.longest or longest))
        unknown = ["what attention shows, though the rules lose nothing"]
        for text in (_other_options(source, target) or unknown) if moved else []:
            report.lose(f"{text} (attention differs by {moved:.2g} of its values)")
        _refuse_losses(report, source, target, allow_loss)
    new = {key: dtype if value.is_floating_point() else value.dtype for key, value in result.items()}
    rounded = _cast(result, {key: types.get(key, new[key]) for key in result})
    for key, value in rounded.items():
        if value.dtype != result[key].dtype:
            report.rounding = max(report.rounding, 16 * torch.finfo(value.dtype).eps)
            if bool(value.isinf().any() and not result[key].isinf().any()):
                largest = float(result[key].abs().max())
                raise ConversionError(
                    f"{key} becomes as large as {largest:.3g}, which {value.dtype} does not hold: store the source as "
                    f"float32"
                )
    return Conversion(rounded, report)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return a type in which arithmetic does not round to 16 bits."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _cast(state: State, dtypes: dict[str, torch.dtype]) -> State:
    """Return a state in other types; tensors of one memory, as tied embeddings are, stay so."""
    made: dict[tuple, Tensor] = {}
    result = {}
    for key, value in state.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype, dtypes[key])
        result[key] = value if value.dtype == dtypes[key] else made.setdefault(place, value.to(dtypes[key]))
    return result


def _refuse_losses(report: ConversionReport, source: PositionPlan, target: PositionPlan, allow_loss: bool) -> None:
    if report.losses and not allow_loss:
        raise NotExactError(
            f"{source.name} -> {target.name} is not exact: {'; '.join(report.lost)}. Convert "
            f"approximately (--approximate) or choose a target that keeps it",
            "; ".join(report.lost),
        )


def _other_options(source: PositionPlan, target: PositionPlan, name: str = "") -> list[str]:
    """Return in words the options of which members of both plans have different values; with a name, of that member."""
    old = {member.scheme.name: member.options for member in source.members if name in ("", member.scheme.name)}
    found = {
        f"{member.scheme.name}: {option.name} {after} instead of {before}": option
        for member in target.members
        for option in in_order(member.scheme.takes if member.scheme.name in old else ())
        if (before := getattr(old[member.scheme.name], option.name)) != (after := getattr(member.options, option.name))
    }
    return [text for text, option in found.items() if option not in ACCOUNTED] or list(found)


@dataclass
class _Work:
    """The work of one conversion: make the tables of the target from those of the source."""

    source: PositionPlan
    target: PositionPlan
    tables: Tables
    report: ConversionReport
    start: str
    fill: str | None
    layers: int

    def __post_init__(self) -> None:
        self.old = {place.name: place for place in places(self.source)}
        pairs = ([places_of(plan, layer) for plan in (self.source, self.target)] for layer in range(self.layers))
        self.taken = [match_members(*pair) for pair in pairs]

    def members(self) -> tuple[Tables, list[tuple[int, PositionScheme]]]:
        """Make the tables of every member of the target.

        Returns:
            The tables, and (layer, scheme) of members without a counterpart in the source.
        """
        made: Tables = {}
        fresh = []
        for place in places(self.target):
            rows: list[Params] = []
            first: Params = {}  # of layers that begin anew, which may have parameters in common
            for layer in range(1 if place.on_input else self.layers):
                if place.index(layer) is None:
                    rows.append({})
                    continue
                scheme = place.build(self.target, layer)
                if place.name in self.taken[layer]:
                    params = self._converted(place, scheme, layer)
                else:
                    params = self._started(scheme)
                    first = first or params
                    params |= {name: first[name] for name in scheme.common_parameters}
                    fresh.append((layer, scheme))
                rows.append(self._checked(spread_heads(params, scheme, self.report), scheme))
            if not place.on_input:
                names = tuple(name for name, _ in scheme.named_parameters())
                alike = names if place.shared else scheme.common_parameters
                rows = merge_layers(rows, alike, place.name, self.report)
            made[place.name] = rows
        return made, fresh

    def _converted(self, place: Place, new: PositionScheme, layer: int) -> Params:
        name = self.taken[layer][place.name]
        old = self.old[name].build(self.source, layer)
        params, length = dict(self.tables[name][layer]), self.target.shape.max_positions
        for part, table in old.tables.items():
            if table.rows == "position":
                params[part] = resize(params[part], length, self.fill, self.report, table.axis)
        if name != place.name:
            self.report.step(f"{name} as {place.name}")
        source = ConversionSource(params, old, new, self.report)
        return fit_to_target(apply_rule(source), source)

    def _checked(self, params: Params, scheme: PositionScheme) -> Params:
        """Return the parameters of a scheme once their shapes are right.

        Raises:
            ConversionError: one has another shape than the scheme's; names options of the scheme that differ.
        """
        for name, parameter in scheme.named_parameters():
            if params[name].shape != parameter.shape:
                options = _other_options(self.source, self.target, scheme.name)
                raise ConversionError(
                    f"{scheme.name}: {name} came out as {tuple(params[name].shape)}, and the target needs "
                    f"{tuple(parameter.shape)}: {'; '.join(options) or 'the sizes of the models differ'}"
                )
        return params

    def _started(self, scheme: PositionScheme) -> Params:
        own = {name: value.detach().clone() for name, value in scheme.named_parameters()}
        values = neutral_parameters(scheme)
        if values is not None and self.start == "neutral":
            if values:
                self.report.step(
                    f"{scheme.name} added at neutral values (--position-lr-scale lets fine-tuning move them)"
                )
            return values
        reason = scheme.never_neutral or "--init own"
        self.report.lose(f"{scheme.name} starts at its own initial values ({reason})")
        return own

    def versions(self, state: State) -> State:
        """Return what a scheme remembers beside its parameters: the source's where it has the scheme, else new."""
        found = {}
        for layer, place in ((n, p) for n in range(self.layers) for p in places_of(self.target, n)):
            old = self.old[place.name].prefix(layer) if self.taken[layer].get(place.name) == place.name else None
            for name, value in place.build(self.target, layer).named_buffers():
                if name.endswith("_version"):
                    found[place.prefix(layer) + name] = value if old is None else state.get(old + name)
        return {name: value for name, value in found.items() if value is not None}

    def dropped_positions(self) -> list[Tensor]:
        """Return the mean row (E,) of every table that was added to the input and is left out."""
        return [
            self.tables[name][0][table].mean(0)
            for name, place in self.old.items()
            if place.on_input and name not in self.taken[0].values()
            for table, told in place.scheme.tables.items()
            if told.rows == "position"
        ]

    def report_unused(self) -> None:
        """Report the members of the source that the target leaves out: as lost, unless their tables are neutral."""
        for name, place in self.old.items():
            unused = [
                (place.build(self.source, layer), params)
                for layer, params in enumerate(self.tables[name])
                if place.index(layer) is not None and name not in self.taken[layer].values()
            ]
            if all(scheme.is_neutral(params) for scheme, params in unused):
                if any(params for _, params in unused):
                    self.report.step(f"{name} left out (its tables are neutral)")
                continue
            self.report.lose(describe_dropped(name, [params for _, params in unused]))


def _mean_into_tokens(content: State, means: list[Tensor], report: ConversionReport) -> State:
    """Add the mean of dropped positions to every token embedding, which shifts all logits of a row alike."""
    if not means:
        return content
    tokens, output = f"{ENCODER}.embed_tokens.weight", "encoder.lm_head.weight"
    added = content[tokens] + torch.stack(means).sum(0).to(content[tokens])
    report.step("the mean of the dropped positions is added to every token (softmax cancels it)")
    tied = output in content and torch.equal(content[output], content[tokens])
    return content | {tokens: added} | ({output: added} if tied else {})


def _shift_projections(content: State, fresh: list[tuple[int, PositionScheme]], report: ConversionReport) -> State:
    """Add the biases of q and k with which a new scheme starts (M4M) to those of the state."""
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
