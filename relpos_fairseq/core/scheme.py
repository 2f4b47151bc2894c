"""PositionScheme: one published way to tell a transformer where its tokens stand.

A scheme declares terms over relations; it never forms an attention matrix.  A forward pass calls, in
this order, where the scheme defines them:

1. `embed(positions)`: what is added to the input embedding;
2. `prepare(positions)`: everything that needs no content, once a forward pass and cached in decoding;
3. `transform_query`, `transform_key`: the content after a rotation (RoPE);
4. `terms(prepared, positions)`: what the scheme's relations contribute to logits and output;
5. `log_gates(source)`: a number for each token of the layer's input, where the scheme has gates, and
   `gate_weights(source)`: what a query multiplies their sums by.

Row rule: whatever concerns query row i depends on q_i, the keys, what is cached with each key, and
`positions` alone.  Blocks of rows, caching and memory are right because of this rule.

Beside the scheme itself stand its declarations: `SchemeInfo` (its row in the table of schemes), `Table`
(what conversion must know of a parameter) and its conversion rules (`convert_from`), each a function
of a `ConversionSource`.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import INIT, RANDOMIZATION, SCALE, SHARE, AttentionShape, Option, SchemeOptions
from relpos_fairseq.core.positions import Positions, is_exported, is_transformed
from relpos_fairseq.core.relations import Clipped, DistanceRelation, Relation, remap_distances
from relpos_fairseq.core.terms import PositionTerms, Reset
from relpos_fairseq.io.errors import UserError


@dataclass(frozen=True)
class SchemeInfo:
    """A scheme's row in the table of schemes (schemes/README.md, which `relpos schemes` writes).

    Args:
        row: sorts the rows, those of one number by name.
        source: paper and equation.
        logits: the equation.
        starts_at: initial values.
        published: number of parameters that the papers count for BERT-base, if they do.
        difference: why our number is another.
    """

    row: int
    source: str
    logits: str
    starts_at: str
    published: str = "-"
    difference: str = ""


# Exponents (a, b) of `Table.grows`: where conversion multiplies q by f_q and k by f_k to fold another
# scale into them, a table is multiplied by f_q^a f_k^b, so that every logit stays as it was.
WITH_Q, WITH_K, WITH_BOTH = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)


@dataclass(frozen=True)
class Table:
    """One parameter of a scheme: what it is made of, and what conversion must know of it.

    Args:
        size: names of its axes: attributes of the scheme, its shape or its options, or numbers; "": the scheme's own
            `__init__` makes it, since options decide whether and how.
        std: the deviation of its initial values, which are normal; 0: all are `start`.
        start: their mean.
        rows: what a row stands for: a `distance` (read by the scheme's relation), an absolute
            `position`, or None.
        axis: the axis of the positions.
        neutral: the value at which the scheme changes no logit; None: its initial value.
        grows: exponents, as `WITH_Q` has them.
        multiplies_both: q and k are both multiplied by this table and the products are added, so that
            q and k can only be scaled alike.
        head_axis: the axis of the heads.
        flat_heads: the first axis holds each head's D rows in turn.
        has_heads: whether there is an axis of heads; without one all heads share the parameter.
        meaning: its name in reports; "": the parameter's name.
        copies: the parameters that it stands for, where other options give each of them its own.
    """

    size: str = ""
    std: float = 0.0
    start: float = 0.0
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
        """Return the parameter in its own layout, from that of `by_head`."""
        return value.flatten(0, 1) if self.flat_heads else value.movedim(0, self.head_axis)


# theta of the reset (2, heads), a parameter of every scheme that takes --position-reset-cls.
RESET_TABLE = Table(neutral=0.0, head_axis=1, meaning="the reset of the first token")


class PositionMismatchError(UserError):
    """A checkpoint was trained under another position scheme than the model has."""


class PositionScheme(nn.Module):
    """Base class of every scheme.  Class attributes declare what a scheme is; nothing else names it.

    Attributes:
        name: the scheme's name on the command line.
        info: its row in the table of schemes.
        takes: the options that it accepts.
        own_scale: C in the published 1/sqrt(C * head_dim); None: the scheme acts on the input alone.
        default_share: sharing of tables in the paper; None where there is nothing to share.
        clip: `vectors` or `scalars`, which decides the clip distance that `auto` means.
        absolute: reads absolute positions, hence carries no memory.
        counts_sentences: reads positions counted from each sentence's start.
        table_limited: refuses input longer than max_positions.
        rotates: transforms queries and keys.
        nonlinear_qk: transforms them nonlinearly: twice a query is not twice the logit.
        resets_by_default: what --position-reset-cls auto means in an encoder.
        replaces_qk: has a trilinear term, which replaces q.k.
        causal_only: is defined only where queries see no key after them, as in a decoder.
        uses_positions: reads distances or positions, which --position-random-range may randomize.

    For conversion:
        tables: what conversion must know of its parameters, by name.
        never_neutral: why no values of its tables leave the logits unchanged; "": some do.
        convert_from: conversion rules: by the name of a scheme, the function that turns the parameters of
            that scheme into this one's, as far as the equations allow; by its own name, the function that
            turns parameters under other options into its own.
        elsewhere: the scheme's names in other libraries, by library.
    """

    name: ClassVar[str]
    info: ClassVar[SchemeInfo]
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
    never_neutral: str = ""  # an instance's options may make it so
    convert_from: ClassVar[dict[str, Callable[[ConversionSource], dict[str, Tensor]]]] = {}
    elsewhere: ClassVar[dict[str, str]] = {}
    _drawn: int = -1  # number of the last draw

    def __init_subclass__(cls, **rest: Any) -> None:
        """Add the options of randomized positions to `takes` if the scheme uses positions, else remove them."""
        super().__init_subclass__(**rest)
        cls.takes = frozenset(cls.takes) - RANDOMIZATION | (RANDOMIZATION if cls.uses_positions else set())

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        super().__init__()
        self.shape = shape
        self.options = options
        if options.reset_cls:
            self.theta = nn.Parameter(torch.zeros(2, self.table_heads))
        for name, table in self.tables.items():
            if table.size:
                size = [self._axis(axis) for axis in table.size.split()]
                drawn = (
                    self.draw(*size, std=table.std, mean=table.start) if table.std else torch.full(size, table.start)
                )
                self.register_parameter(name, nn.Parameter(drawn))

    def _axis(self, name: str) -> int:
        """Return the length of an axis of `Table.size`."""
        if name.isdigit():
            return int(name)
        for place in (self, self.shape, self.options):
            if hasattr(place, name):
                return getattr(place, name)
        raise ValueError(
            f"position scheme {self.name}: a table's axis {name} is no number, and no name of the scheme, of its "
            f"AttentionShape or of an option that it takes"
        )

    @classmethod
    def built(cls, shape: AttentionShape, options: SchemeOptions) -> PositionScheme:
        """Build the scheme with its initial values, or neutral ones where the options ask for them.

        Raises:
            ValueError: no values leave the logits unchanged, or gradients vanish at those that do.
        """
        scheme = cls(shape, options)
        if options.init == "neutral":
            scheme.start_neutral()
        return scheme

    def is_neutral(self, params: Mapping[str, Tensor]) -> bool:
        """Tell whether the scheme with these parameters changes nothing, so that it may be left out."""
        wanted = ((value, self.table_of(name).neutral) for name, value in params.items())
        return not self.never_neutral and all(
            neutral is None or bool((value == neutral).all()) for value, neutral in wanted
        )

    def start_neutral(self) -> None:
        """Set the tables to the values that change no logit."""
        if self.never_neutral and self.tables:
            raise ValueError(f"{INIT.flag} neutral: {self.name}: {self.never_neutral}")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                neutral = self.table_of(name).neutral
                if neutral is not None:
                    parameter.fill_(neutral)

    def read_content(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Keep the layer's projections of queries and keys, for options that project positions by them."""
        if getattr(self.options, "projections", "own") == "content":
            self.content = (q_proj, k_proj)  # in a tuple: the layer registers them, not the scheme

    @classmethod
    def table_of(cls, parameter: str) -> Table:
        """Return the declaration of a parameter.

        Raises:
            ValueError: it has none.
        """
        if parameter == "theta":
            return RESET_TABLE
        if parameter not in cls.tables:
            raise ValueError(f"position scheme {cls.name}: its `tables` lack the parameter {parameter}: add its Table")
        return cls.tables[parameter]

    @classmethod
    def has_position_table(cls) -> bool:
        """Return whether the scheme has a table with one row for each position."""
        return any(table.rows == "position" for table in cls.tables.values())

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for options that contradict each other; called once all are resolved.

        Raises:
            ValueError: names both, and the way out.
        """

    @classmethod
    def counts_tokens(cls, options: SchemeOptions) -> bool:
        """Return whether the scheme, though relative, reads how many tokens a row has, or which is its first."""
        return False

    @property
    def by_length(self) -> bool:
        """True if `prepare` depends on the number of keys: decoding then calls it at every step."""
        return False

    @classmethod
    def scale_under(cls, value: Callable[[Option], Any]) -> float | None:
        """Return C in the published 1/sqrt(C * head_dim), given the value of each option."""
        return cls.own_scale

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """Names of parameters that the instances of all layers share."""
        return ()

    @property
    def table_heads(self) -> int:
        """First dimension of every table: 1 where heads share it, else H."""
        return 1 if self.options.share in ("heads", "both") else self.shape.num_heads

    @property
    def scalar_gain(self) -> float:
        """The factor by which stored scalars are multiplied (--position-scalar-gain)."""
        return getattr(self.options, "scalar_gain", 1.0)

    @property
    def scale(self) -> float:
        """The factor of q.k: 1/sqrt(C * head_dim)."""
        return (self.options.scale * self.shape.head_dim) ** -0.5

    @property
    def relation(self) -> Relation:
        """The relation by which its tables are read."""
        return self.clipped

    @property
    def distances(self) -> int:
        """Number of rows of a table that the relation reads."""
        return self.relation.size

    @property
    def clipped(self) -> Clipped:
        """The relation of a table over clipped distances."""
        reach = self.options.clip_distance or max(self.shape.max_positions - 1, 1)
        return Clipped(reach, reach)

    def draw(self, *size: int, std: float, mean: float = 0.0, uniform: bool = False) -> nn.Parameter:
        """Draw a parameter from N(mean, std), or a uniform distribution of that mean and deviation.

        The global random state is not used: the generator's seed is made from the global seed, the place of
        the scheme in the model and the number of parameters and draws before, so that the choice of a scheme
        changes no other parameter's initial value, and no two draws are the same.
        """
        generator = self._generator()
        if uniform:
            values = (2 * torch.rand(*size, generator=generator) - 1) * math.sqrt(3)
        else:
            values = torch.randn(*size, generator=generator)
        return nn.Parameter(values * std + mean)

    def _generator(self) -> torch.Generator:
        self._drawn = max(sum(1 for _ in self.parameters()), self._drawn + 1)
        label = f"{self.shape.seed_name}/{self.name}/{self._drawn}"
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
        """Raise an error for input longer than a table of positions.

        Raises:
            ValueError: names scheme, limit, length and the way out.
        """
        if is_exported() or not self.table_limited or positions.src_len <= self.shape.max_positions:
            return
        length = positions.src_len
        if positions.token_index is not None and not is_transformed():  # padding needs no row of a table
            length = positions.longest_row()
        if length > self.shape.max_positions:
            raise ValueError(
                f"position scheme {self.name} has a table of {self.shape.max_positions} positions "
                f"and the input has {length}: train with a larger "
                f"{self.shape.length_flag}, shorten the input, or choose a relative scheme, which "
                f"takes any length"
            )

    def reset_at(self, positions: Positions) -> Reset | None:
        """Return the reset of the first token's row and column, or None where it is off."""
        if not self.options.reset_cls:
            return None
        return Reset(self.theta[0], self.theta[1], positions.first_slot())

    def initialize_projections(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Set initial values of a layer's projections, after the model's own; M4M alone sets biases."""

    def embed(self, positions: Positions) -> Tensor | None:
        """Return what is added to the embeddings of the queries' tokens: (B|1, T, E), or None."""
        return None

    def prepare(self, positions: Positions) -> Any:
        """Compute everything that needs no content, once a forward pass.

        What is prepared for some positions serves fewer keys too, unless the scheme is `by_length`.
        """
        return None

    def rotary(self) -> Any:
        """Return its rotation as a `rotation.Rotary`; None: it has none, or one of another kind."""
        return None

    def transform_query(self, q: Tensor, prepared: Any, start: int) -> Tensor:
        """Transform q (B, H, T, D), whose first row stands at slot `start`."""
        return q

    def transform_key(self, k: Tensor, prepared: Any, start: int) -> Tensor:
        """Transform k (B, H, S, D), whose first row stands at slot `start`."""
        return k

    def turns(self, prepared: Any, start: int) -> tuple[Tensor, bool] | None:
        """Return complex numbers (slots, P), from slot `start` on, by which pairs of channels of q and k are turned.

        With them stands whether channels (c, c + P) are a pair, else (2c, 2c + 1).  None: the transforms are no such
        products, or others for each row.
        """
        return None

    def log_gates(self, source: Tensor) -> Tensor | None:
        """Return the logarithms of each token's gates, computed from the layer's input at that token alone.

        `terms.Decay` says what they add to the logits; padding adds nothing.  Decoding caches them with the keys.

        Args:
            source: (S, B, E) input of the key projection, memory included.

        Returns:
            (B, H|1, S, 1), of keys before a query, or (B, H|1, S, 2) with those after it; or None.
        """
        return None

    def gate_weights(self, source: Tensor) -> Tensor | None:
        """Return what each query multiplies the sums of `log_gates` by, (B, H|1, S), or None for 1."""
        return None

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return what the scheme's relations contribute.

        Decoding keeps the terms of one step for the steps that follow: they may depend on `positions` by a
        reset and by static_factors alone.
        """
        return ()


REGISTER: dict[str, type[PositionScheme]] = {}


def mark_schemes(model: nn.Module) -> list[PositionScheme]:
    """Return a model's schemes of attention, absolute ones aside; `takes_position_lr` now knows their parameters."""
    found = (part for part in model.modules() if isinstance(part, PositionScheme))
    schemes = [part for part in found if not part.absolute and part.own_scale is not None]  # None: in the input alone
    for parameter in (one for scheme in schemes for one in scheme.parameters()):
        parameter.takes_position_lr = True  # type: ignore[attr-defined]
    return schemes


def takes_position_lr(parameter: Any) -> bool:
    """Return whether a parameter, or its copy in fp32, is of one of the schemes that `mark_schemes` has seen."""
    return getattr(parameter, "takes_position_lr", False)


def register_scheme(name: str) -> Callable[[type[PositionScheme]], type[PositionScheme]]:
    """Register the decorated class as the scheme `name`."""

    def keep(cls: type[PositionScheme]) -> type[PositionScheme]:
        known = REGISTER.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"position scheme {name} is registered twice: {known} and {cls}: rename one")
        check_declared(name, cls)
        cls.name = name
        REGISTER[name] = cls
        return cls

    return keep


def check_declared(name: str, cls: type[PositionScheme]) -> None:
    """Raise a ValueError, which says what to change, for a scheme that cannot be registered as `name`."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"position scheme {name!r}: a name has small letters, digits and _, and begins with a letter")
    if getattr(cls, "info", None) is None:
        raise ValueError(f"position scheme {name}: {cls.__name__} needs info = SchemeInfo(...), its row in the tables")
    if cls.default_share not in (None, *SHARE.choices):
        raise ValueError(f"position scheme {name}: default_share is {SHARE.values}, or None, got {cls.default_share!r}")
    if not all(isinstance(option, Option) for option in cls.takes):
        raise ValueError(f"position scheme {name}: takes is a frozenset of options, got {cls.takes!r}")
    others = {option.name: (option, other) for other, kind in REGISTER.items() for option in kind.takes}
    for option in cls.takes:
        option.check(name)
        first, other = others.get(option.name, (option, name))
        if (first.place, first.help) != (option.place, option.help):
            raise ValueError(
                f"position schemes {other} and {name} declare two options {option.name}: take one of them for both, or "
                f"rename one"
            )


class LossReport(Protocol):
    """Where a conversion reports what is not exact."""

    def lose(self, text: str, moved: float = 0.0) -> None:
        """Report what the target cannot express, and the largest change of a table."""

    def limit(self, length: int, reason: str = "") -> None:
        """Report the longest input in tokens for which the conversion is exact, and why."""


@dataclass(frozen=True)
class ConversionSource:
    """One layer's parameters of the scheme to convert from; q and k are scaled for the target already.

    Args:
        params: parameters of the source, by name.
        old: the source scheme.
        new: the target scheme, with its initial values.
        report: takes what is lost.
    """

    params: dict[str, Tensor]
    old: PositionScheme
    new: PositionScheme
    report: LossReport

    def remap_table(self, name: str) -> Tensor:
        """Return the source's table over distances with the rows of the target's relation."""
        old, new = cast(DistanceRelation, self.old.relation), cast(DistanceRelation, self.new.relation)
        length = self.new.shape.max_positions
        table, error, beyond = remap_distances(self.params[name], old, new, length)
        if error:
            self.report.lose(f"{self.old.name}: {name} over {old} is averaged over {new}", error)
        elif beyond:
            self.report.limit(length, f"{self.new.name} reads its ends beyond")
        gain = self.old.scalar_gain / self.new.scalar_gain
        return table if gain == 1 else table * gain

    def identities(self, like: Tensor) -> Tensor:
        """Return a unit matrix (heads, D, D) for each head of `like` (heads, ...)."""
        dim = self.new.shape.head_dim
        return torch.eye(dim, dtype=like.dtype, device=like.device).expand(like.size(0), dim, dim)

    def reset(self) -> dict[str, Tensor]:
        """Return the reset's parameter under its name, if the source has one."""
        return {name: value for name, value in self.params.items() if name == "theta"}

    def zeros(self, name: str, like: Tensor) -> Tensor:
        """Return zeros for a parameter of the target, for as many heads as `like` has."""
        return like.new_zeros(like.size(0), *self.new.get_parameter(name).shape[1:])
