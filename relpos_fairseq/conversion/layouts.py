"""Split a RoBERTa's state into content and position tables, by member and layer, and join them again.

Names are those of fairseq's RobertaModel. fairseq keeps learned positions in `embed_positions`, with two rows before
position 0 (its padding index and one); here they are the table of the scheme `learned`. Parameters of schemes lie under
`positions.shared` (those that layers share, and those that act on the input) or `layers.N.self_attn.position`, numbered
in the order of the hybrid's members there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.core.plan import PositionPlan, encode_text
from relpos_fairseq.core.scheme import PositionScheme, SchemeOptions
from relpos_fairseq.schemes.segments import SegmentHead, SegmentInput

ENCODER = "encoder.sentence_encoder"
FAIRSEQ_OFFSET = 2  # rows before position 0 in fairseq's and Hugging Face's RoBERTa tables
VERSION = f"{ENCODER}.positions.scheme_version"

State = dict[str, Tensor]
Params = dict[str, Tensor]
# Parameters of every member, by name: one dictionary a layer (empty where the layer does not have
# the member), or one alone on the input.
Tables = dict[str, list[Params]]


@dataclass(frozen=True)
class Place:
    """Locate the parameters of one member of a stack of schemes.

    Args:
        name: the scheme's name; `segment_head` and `segment_input` for segments.
        scheme: its class.
        options: its options.
        shared: whether one instance serves all layers.
        indices: its number in the list that it lies in, a part of the plan each; None where the
            layers of a part do not have it.
    """

    name: str
    scheme: type[PositionScheme]
    options: SchemeOptions
    shared: bool
    indices: tuple[int | None, ...]

    @property
    def on_input(self) -> bool:
        """Whether the member acts on the input alone, and so has one set of tables."""
        return self.scheme.own_scale is None

    def index(self, layer: int) -> int | None:
        """Return the member's number in a layer's list of schemes, None where the layer does not have it."""
        return self.indices[layer % len(self.indices)]

    def prefix(self, layer: int) -> str:
        """Return the prefix of the member's parameters in a state."""
        if self.shared:
            return f"{ENCODER}.positions.shared.{self.index(layer)}."
        return f"{ENCODER}.layers.{layer}.self_attn.position.{self.index(layer)}."

    def build(self, plan: PositionPlan, layer: int) -> PositionScheme:
        """Build the scheme, with the initial values that a model gives it."""
        where = "shared" if self.shared else str(layer)
        name = f"{plan.shape.seed_name}.{where}"
        return self.scheme.built(replace(plan.shape, seed_name=name), self.options)


def places(plan: PositionPlan) -> list[Place]:
    """List every member of a stack, segments included, in the order of its modules."""
    members = [(m.scheme.name, m.scheme, m.options, m.across_layers) for m in plan.members]
    segment = SchemeOptions(share=plan.segment_share, scale=plan.scale_constant, num_segments=plan.num_segments)
    if plan.segment_encoding == "head":
        members.append((SegmentHead.name, SegmentHead, segment, plan.segment_share in ("layers", "both")))
    elif plan.segment_encoding == "input":
        members.append((SegmentInput.name, SegmentInput, segment, True))
    segments = [scheme for _, scheme, _, _ in members[len(plan.members) :]]
    parts = [[m.scheme for m in part.members] + segments for part in plan.parts or (plan,)]
    across = [scheme for _, scheme, _, shared in members if shared]
    found = []
    for name, scheme, options, shared in members:
        # A layer's own list holds what it alone has; the list of what layers share is one.
        lists = (across if shared else [s for s in p if s not in across] for p in parts)
        pairs = zip(parts, lists, strict=True)
        indices = (mine.index(scheme) if scheme in part else None for part, mine in pairs)
        found.append(Place(name, scheme, options, shared, tuple(indices)))
    return found


def places_of(plan: PositionPlan, layer: int) -> list[Place]:
    """List the members that one layer has, segments included."""
    return [place for place in places(plan) if place.index(layer) is not None]


def count_layers(state: State) -> int:
    """Count the layers of a state.

    Raises:
        ConversionError: it has none, or its numbers have gaps.
    """
    pattern = re.compile(rf"{re.escape(ENCODER)}\.layers\.(\d+)\.")
    numbers = {int(match.group(1)) for key in state if (match := pattern.match(key))}
    if not numbers:
        raise ConversionError(f"the model has no {ENCODER}.layers: give a checkpoint of RoBERTa or BERT")
    missing = sorted(set(range(max(numbers) + 1)) - numbers)
    if missing:
        raise ConversionError(f"the model lacks layers {missing}: its file is incomplete")
    return len(numbers)


def split(state: State, plan: PositionPlan) -> tuple[State, Tables]:
    """Split a state into content and position tables; shared tables are repeated for every layer.

    Raises:
        ConversionError: a table is missing or has another shape than the plan says.
    """
    layers = count_layers(state)
    tables: Tables = {}
    for place in places(plan):
        reads = 1 if place.on_input else layers
        tables[place.name] = [
            {} if place.index(layer) is None else _params(state, place, plan, layer) for layer in range(reads)
        ]
    shared, own = f"{ENCODER}.positions.", ".self_attn.position."
    content = {k: v for k, v in state.items() if not k.startswith(shared) and own not in k}
    return content, tables


def _params(state: State, place: Place, plan: PositionPlan, layer: int) -> Params:
    prefix = place.prefix(layer)
    expected = dict(place.build(plan, layer).named_parameters())
    params = {}
    for name, parameter in expected.items():
        value = state.get(prefix + name)
        if value is None:
            raise ConversionError(f"the source has no {prefix}{name}, which its position scheme {place.name} has")
        if value.shape != parameter.shape:
            raise ConversionError(
                f"{prefix}{name} is {tuple(value.shape)} in the source, and its flags say "
                f"{tuple(parameter.shape)}: give the source's own position flags"
            )
        params[name] = value
    return params


def join(content: State, tables: Tables, plan: PositionPlan) -> State:
    """Join content and tables to the state of a model with the positions of `plan`.

    The tables of members that layers share are those of the first layer that has them.
    """
    state = dict(content)
    for place in places(plan):
        for layer, params in enumerate(tables[place.name]):
            for name, value in params.items():
                state.setdefault(place.prefix(layer) + name, value.clone())
    state[VERSION] = encode_text(plan.describe())
    return state


def learned_from_fairseq(state: State) -> State:
    """Rename the tensors of fairseq's RoBERTa as those of a relpos_roberta with `learned` positions."""
    state = dict(state)
    key = f"{ENCODER}.embed_positions.weight"
    if key not in state:
        raise ConversionError(f"the checkpoint has no {key}: only RoBERTa with learned positions is converted")
    state[f"{ENCODER}.positions.shared.0.table"] = state.pop(key)[FAIRSEQ_OFFSET:]
    return state
