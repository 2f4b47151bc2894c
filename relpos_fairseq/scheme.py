"""Define PositionScheme, the base class of every position scheme, and what a scheme declares of itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from relpos_fairseq.options import INIT, RANDOMIZATION, SCALE, AttentionShape, Option, SchemeOptions
from relpos_fairseq.positions import Positions, is_exported
from relpos_fairseq.relations import Clipped, DistanceRelation, Relation
from relpos_fairseq.terms import PositionTerms, Reset

# ---- A scheme's row in the contract table (schemes/README.md, which `relpos schemes` writes).


@dataclass(frozen=True)
class SchemeInfo:
    """What the table says of a scheme.

    Args:
        row: where it stands among the other rows; the gaps leave room for new schemes.
        source: paper and equation.
        logits: the equation, in words of the table.
        starts_at: initial values.
        published: parameters of BERT-base as the papers count them, if they do.
        difference: why ours are not that number.
    """

    row: int
    source: str
    logits: str
    starts_at: str
    published: str = "-"
    difference: str = ""


# ---- What conversion must know of a scheme's parameters.
# Each scheme declares a `Table` for each of its parameters; `conversion` reads nothing else.


# Powers (a, b) of what q and k grow by: a table grows by f_q^a f_k^b.
WITH_Q, WITH_K, WITH_BOTH = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)


@dataclass(frozen=True)
class Table:
    """One parameter of a scheme.

    Args:
        rows: what a row stands for: a `distance` (read by the scheme's relation), an absolute
            `position`, or None.
        axis: of the positions.
        neutral: the value at which the scheme changes no logit; None: its initial value.
        grows: powers of the factors by which the projections of q and k grow when another scale is
            folded into them (`conversion.scales`), so that every logit stays what it was.
        multiplies_both: q and k are both multiplied by this table and their products added: they can
            only grow alike.
        head_axis: of the heads.
        flat_heads: the first axis holds the heads' rows of width D one after another.
        has_heads: whether there is an axis of heads; else all heads have the parameter in common.
        meaning: what a reader of a report calls it, if not by its name.
        copies: the parameters that it stands for, where options give each of them its own.
    """

    rows: Literal["distance", "position"] | None = None
    axis: int = 0
    neutral: float | None = None
    grows: tuple[float, float] = (0.0, 0.0)
    multiplies_both: bool = False
    head_axis: int = 0
    flat_heads: bool = False
    has_heads: bool = True
    meaning: str = ""
    copies: tuple[str, ...] = ()

    def by_head(self, value: Tensor, head_dim: int) -> Tensor:
        """Return the parameter with heads as its first axis."""
        if self.flat_heads:
            return value.unflatten(0, (-1, head_dim))
        return value.movedim(self.head_axis, 0)

    def stored(self, value: Tensor) -> Tensor:
        """Return what `by_head` was given."""
        return value.flatten(0, 1) if self.flat_heads else value.movedim(0, self.head_axis)


# theta of the reset (2, heads), which every scheme with --position-reset-cls has.
RESET_TABLE = Table(neutral=0.0, head_axis=1, meaning="the reset of the first token")


def remap_distances(
    table: Tensor, source: DistanceRelation, target: DistanceRelation, length: int
) -> tuple[Tensor, float, float]:
    """Return a table over distances for another relation.

    A row of the target that several distances read becomes the mean of what the source has for
    them, those that inputs of `length` tokens meet if there are any.

    Args:
        table: (H|1, R, ...) of the source.
        source: the relation that it is read by.
        target: the relation that the result is read by.
        length: longest input that the target is meant for.

    Returns:
        (H|1, R', ...); the largest difference that a distance of such inputs sees (0: exact); and
        the largest that a longer distance sees.
    """
    if source == target:
        return table, 0.0, 0.0
    # One more than any of them knows: what all further distances read.
    reach = max(-source.lowest, source.highest, -target.lowest, target.highest, length) + 1
    distance = torch.arange(-reach, reach + 1, device=table.device)
    old, new = source.of_distance(distance), target.of_distance(distance)
    met = distance.abs() < length
    counted = torch.zeros(target.size, dtype=torch.long, device=table.device)
    counted.index_add_(0, new, met.long())
    weight = (met | (counted[new] == 0)).to(table.dtype)
    total = torch.zeros(target.size, dtype=table.dtype, device=table.device)
    total.index_add_(0, new, weight)
    # Some distance of a row, then the mean of the differences to it: equal rows stay to the bit.
    some = torch.zeros(target.size, dtype=torch.long, device=table.device)
    some[new[weight > 0]] = (weight > 0).nonzero()[:, 0]
    result = table[:, old[some]]
    tail = [1] * (table.dim() - 2)
    apart = (table[:, old] - result[:, new]) * weight.view(1, -1, *tail)
    mean = torch.zeros_like(result).index_add_(1, new, apart)
    result = result + mean / total.clamp(min=1).view(1, -1, *tail)
    error = (table[:, old] - result[:, new]).abs().reshape(table.size(0), len(new), -1)
    beyond = float(error[:, ~met].max()) if not bool(met.all()) else 0.0
    return result, float(error[:, met].max()), beyond


# ---- PositionScheme: one published way to tell a transformer where its tokens stand.
# A scheme declares terms over relations; it never forms an attention matrix.  What it may do, in the
# order in which a forward pass asks:
#
# 1. `embed(positions)`: what is added to the input embedding;
# 2. `prepare(positions)`: everything free of content, once a forward pass and cached in decoding;
# 3. `transform_query`, `transform_key`: rotate the content (RoPE);
# 4. `terms(prepared, positions)`: what its relations contribute to logits and output;
# 5. `log_gates(source)`: a number a token of the layer's input, where it has gates.
#
# Row rule: whatever concerns query row i depends on q_i, the keys, what is kept with each key, and
# `positions` alone.  Blocks, caching and memory are right because of it.


class PositionMismatchError(ValueError):
    """A checkpoint was trained under another position scheme than the model has."""


class PositionScheme(nn.Module):
    """Base of every scheme.  Class attributes say what a scheme is; nothing else names it.

    Attributes:
        name: the scheme's name on the command line.
        card: its row in the contract table.
        takes: the options that it accepts.
        own_scale: C in the published 1/sqrt(C * head_dim); None: acts on the input alone.
        default_share: sharing in the paper; None where there is nothing to share.
        clip: `vectors` or `scalars`, which decides the clip distance that `auto` means.
        absolute: reads absolute positions, hence has a longest input and carries no memory.
        counts_sentences: reads positions counted from each sentence's start.
        table_limited: refuses input longer than max_positions.
        rotates: transforms queries and keys.
        nonlinear_qk: transforms them so that twice a query is not twice the logit.
        resets_by_default: what --position-reset-cls auto means in an encoder.
        replaces_qk: has a trilinear term.
        causal_only: is defined for a decoder's queries alone, which see no key after them.
        uses_positions: reads distances or positions, which --position-random-range may draw.

    For conversion:
        tables: its parameters, by name.
        never_neutral: why no values of its tables leave the logits as they are; "": some do.
        convert_from: by the name of a scheme, how that one's parameters become this one's, as far as
            equal terms go; by its own name, what its options change.
        elsewhere: names of the same scheme in other libraries.
    """

    name: ClassVar[str]
    card: ClassVar[SchemeInfo]
    takes: ClassVar[frozenset[Option]] = frozenset({SCALE})
    own_scale: ClassVar[float | None] = 1.0
    default_share: ClassVar[str | None] = None
    clip: ClassVar[str | None] = None
    absolute: ClassVar[bool] = False
    counts_sentences: ClassVar[bool] = False
    table_limited: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    nonlinear_qk: ClassVar[bool] = False
    resets_by_default: ClassVar[bool] = False
    replaces_qk: ClassVar[bool] = False
    causal_only: ClassVar[bool] = False
    uses_positions: ClassVar[bool] = True
    tables: ClassVar[dict[str, Table]] = {}
    never_neutral: ClassVar[str] = ""
    convert_from: ClassVar[dict[str, Callable[[Any], dict[str, Tensor]]]] = {}
    elsewhere: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **rest: Any) -> None:
        """Let every scheme take what is for all that read positions."""
        super().__init_subclass__(**rest)
        cls.takes = cls.takes - RANDOMIZATION | (RANDOMIZATION if cls.uses_positions else set())

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        super().__init__()
        self.shape = shape
        self.options = options
        if options.reset_cls:
            self.theta = nn.Parameter(torch.zeros(2, self.table_heads))

    @classmethod
    def built(cls, shape: AttentionShape, options: SchemeOptions) -> PositionScheme:
        """Return the scheme with its initial values, or neutral ones where the options say so.

        Raises:
            ValueError: no values leave the logits as they are, or gradients leave none that do.
        """
        scheme = cls(shape, options)
        if options.init == "neutral":
            scheme.start_neutral()
        return scheme

    def start_neutral(self) -> None:
        """Give the tables those of their values that change no logit."""
        if self.never_neutral and self.tables:
            raise ValueError(f"{INIT.flag} neutral: {self.name}: {self.never_neutral}")
        with torch.no_grad():
            for name, value in self.named_parameters():
                if self.table_of(name).neutral is not None:
                    value.fill_(self.table_of(name).neutral)

    def read_content(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Take the layer's projections of queries and keys, for positions that share them."""
        if getattr(self.options, "projections", "own") == "content":
            self.content = (q_proj, k_proj)  # in a tuple: the layer registers them, not the scheme

    @classmethod
    def table_of(cls, parameter: str) -> Table:
        """Return what is declared of a parameter."""
        return RESET_TABLE if parameter == "theta" else cls.tables[parameter]

    @classmethod
    def has_position_table(cls) -> bool:
        """Tell whether it has a table with a row a position."""
        return any(table.rows == "position" for table in cls.tables.values())

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Refuse options that contradict each other; called once each is read.

        Raises:
            ValueError: names both, and the way out.
        """

    @classmethod
    def counts_tokens(cls, options: SchemeOptions) -> bool:
        """Tell whether it must know how many tokens a row has, though it is relative."""
        return False

    @property
    def by_length(self) -> bool:
        """Whether what it prepares depends on the number of keys, so that each step prepares it."""
        return False

    @classmethod
    def scale_under(cls, value: Callable[[Option], Any]) -> float:
        """Return C in the published 1/sqrt(C * head_dim), given what options are set to."""
        return cls.own_scale

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """Names of parameters that the instances of all layers have in common."""
        return ()

    @property
    def table_heads(self) -> int:
        """First dimension of every table: 1 where heads share it, else H."""
        return 1 if self.options.share in ("heads", "both") else self.shape.num_heads

    @property
    def scalar_gain(self) -> float:
        """What stored scalars are multiplied by."""
        return getattr(self.options, "scalar_gain", 1.0)

    @property
    def scale(self) -> float:
        """What q.k is multiplied by: 1/sqrt(C * head_dim)."""
        return (self.options.scale * self.shape.head_dim) ** -0.5

    @property
    def relation(self) -> Relation:
        """The relation that its tables are read by."""
        return self.clipped

    @property
    def clipped(self) -> Clipped:
        """The relation of a table over clipped distances."""
        reach = self.options.clip_distance or max(self.shape.max_positions - 1, 1)
        return Clipped(reach, reach)

    def draw(self, *size: int, std: float, mean: float = 0.0, uniform: bool = False) -> nn.Parameter:
        """Draw a parameter from N(mean, std), or evenly with that deviation, without touching the global random state.

        The stream depends on the global seed, where the scheme stands and what was drawn before,
        so that choosing a scheme changes no other parameter's initial value.
        """
        generator = self._generator()
        if uniform:
            values = (2 * torch.rand(*size, generator=generator) - 1) * math.sqrt(3)
        else:
            values = torch.randn(*size, generator=generator)
        return nn.Parameter(values * std + mean)

    def _generator(self) -> torch.Generator:
        drawn = sum(1 for _ in self.parameters())
        label = f"{self.shape.seed_name}/{self.name}/{drawn}"
        generator = torch.Generator()
        generator.manual_seed((torch.initial_seed() + zlib.crc32(label.encode())) % 2**63)
        return generator

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            saved = state_dict.get(prefix + name)
            if saved is not None and saved.shape != parameter.shape:
                raise PositionMismatchError(
                    f"{prefix}{name}: the checkpoint's table is {tuple(saved.shape)}, that of the "
                    f"flags {tuple(parameter.shape)}: give the checkpoint's "
                    f"{self.shape.length_flag}, widths and heads"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def check_length(self, positions: Positions) -> None:
        """Refuse input that a table does not reach.

        Raises:
            ValueError: names scheme, limit, length and the way out.
        """
        if is_exported() or not self.table_limited or positions.src_len <= self.shape.max_positions:
            return
        length = positions.src_len
        if positions.token_index is not None:  # padding needs no row of a table
            length = positions.longest_row()
        if length > self.shape.max_positions:
            raise ValueError(
                f"position scheme {self.name} has a table of {self.shape.max_positions} positions "
                f"and the input has {length}: train with a larger "
                f"{self.shape.length_flag}, shorten the input, or choose a relative scheme, which "
                f"takes any length"
            )

    def reset_at(self, positions: Positions) -> Reset | None:
        """Return the reset of the first token's row and column, where it is switched on."""
        if not self.options.reset_cls:
            return None
        return Reset(self.theta[0], self.theta[1], positions.first_slot())

    def initialize_projections(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Called once after the model's own initialisation; M4M alone sets the biases."""

    def embed(self, positions: Positions) -> Tensor | None:
        """Return (B|1, T, E) to add to the embedding of the queries' tokens, or None."""
        return None

    def prepare(self, positions: Positions) -> Any:
        """Whatever needs no content: once a forward pass; a longer `positions` serves a shorter."""
        return None

    def rotary(self) -> Any:
        """Return its rotation as a `rotation.Rotary`; None: it has none, or one of its own kind."""
        return None

    def transform_query(self, q: Tensor, prepared: Any, start: int) -> Tensor:
        """Transform q (B, H, T, D), whose first row stands at slot `start`."""
        return q

    def transform_key(self, k: Tensor, prepared: Any, start: int) -> Tensor:
        """Transform k (B, H, S, D), whose first row stands at slot `start`."""
        return k

    def log_gates(self, source: Tensor) -> Tensor | None:
        """Return the logarithms of each token's gates, formed of the layer's input at it alone.

        What they add to the logits is said in `terms.Decay`.  Decoding caches them with the keys.

        Args:
            source: (S, B, E) input of the key projection, memory included.

        Returns:
            (B, H|1, S, 1), of keys before a query, or (B, H|1, S, 2) with those after it; or None.
        """
        return None

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return what the scheme's relations contribute."""
        return ()


REGISTER: dict[str, type[PositionScheme]] = {}


def register_scheme(name: str) -> Callable[[type[PositionScheme]], type[PositionScheme]]:
    """Class decorator: make a scheme known by `name`."""

    def keep(cls: type[PositionScheme]) -> type[PositionScheme]:
        known = REGISTER.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"position scheme {name} is registered twice: {known} and {cls}")
        cls.name = name
        REGISTER[name] = cls
        return cls

    return keep


# ---- ConversionSource: the parameters of one scheme on their way into another's tables.
# What a scheme's `convert_from` is made of.  q and k stand at the target's scale already.


class LossReport(Protocol):
    """Where a conversion says what it lost."""

    def lose(self, text: str, moved: float = 0.0) -> None:
        """Say what the target cannot express, and how far a table moved."""

    def limit(self, text: str) -> None:
        """Say for which inputs alone the conversion is exact."""


@dataclass(frozen=True)
class ConversionSource:
    """One layer's parameters of a scheme.

    Args:
        params: the source's, by name.
        old: the source.
        new: the target, with its initial values.
        report: where losses are said.
    """

    params: dict[str, Tensor]
    old: PositionScheme
    new: PositionScheme
    report: LossReport

    def remap_table(self, name: str) -> Tensor:
        """Return a table over distances as the target's relation reads it."""
        old, new = self.old.relation, self.new.relation
        length = self.new.shape.max_positions
        table, error, beyond = remap_distances(self.params[name], old, new, length)
        if error:
            self.report.lose(f"{self.old.name}: {name} over {old} is averaged over {new}", error)
        elif beyond:
            self.report.limit(f"inputs of up to {length} tokens ({self.new.name} reads its ends beyond)")
        gain = self.old.scalar_gain / self.new.scalar_gain
        return table if gain == 1 else table * gain

    def reset(self) -> dict[str, Tensor]:
        """Return the reset's parameter, where the source has one."""
        return {name: value for name, value in self.params.items() if name == "theta"}

    def zeros(self, name: str, like: Tensor) -> Tensor:
        """Return zeros for a parameter of the target, for as many heads as `like` has."""
        return like.new_zeros(like.size(0), *getattr(self.new, name).shape[1:])


def identity_per_head(like: Tensor, dim: int) -> Tensor:
    """Return a unit matrix (heads, dim, dim) for each head of `like` (heads, ...)."""
    return torch.eye(dim, dtype=like.dtype, device=like.device).expand(like.size(0), dim, dim)
