"""PositionScheme: one published way to tell a transformer where its tokens stand.

A scheme declares terms over relations; it never forms an attention matrix.  What it may do, in the
order in which a forward pass asks:

1. `embed(positions)`: what is added to the input embedding;
2. `prepare(positions)`: everything free of content, once a forward pass and cached in decoding;
3. `transform_query`, `transform_key`: rotate the content (RoPE);
4. `terms(prepared, positions)`: what its relations contribute to logits and output;
5. `log_gates(source)`: a number a token of the layer's input, where it has gates.

Row rule: whatever concerns query row i depends on q_i, the keys, what is kept with each key, and
`positions` alone.  Blocks, caching and memory are right because of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relpos_fairseq.card import SchemeCard
from relpos_fairseq.options import DRAWING, INIT, SCALE, AttentionShape, Option, SchemeOptions
from relpos_fairseq.positions import Positions, is_exported
from relpos_fairseq.relations import Clipped, Relation
from relpos_fairseq.tables import RESET_TABLE, Table
from relpos_fairseq.terms import PositionTerms, Reset


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
        bends_content: transforms them so that twice a query is not twice the logit.
        resets_by_default: what --position-reset-cls auto means in an encoder.
        replaces_content: has a trilinear term.
        causal_only: is defined for a decoder's queries alone, which see no key after them.
        reads_places: reads distances or positions, which --position-random-range may draw.

    For conversion:
        tables: its parameters, by name.
        never_neutral: why no values of its tables leave the logits as they are; "": some do.
        takes_over: by the name of a scheme, how that one's parameters become this one's, as far as
            equal terms go; by its own name, what its options change.
        elsewhere: names of the same scheme in other libraries.
    """

    name: ClassVar[str]
    card: ClassVar[SchemeCard]
    takes: ClassVar[frozenset[Option]] = frozenset({SCALE})
    own_scale: ClassVar[float | None] = 1.0
    default_share: ClassVar[str | None] = None
    clip: ClassVar[str | None] = None
    absolute: ClassVar[bool] = False
    counts_sentences: ClassVar[bool] = False
    table_limited: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    bends_content: ClassVar[bool] = False
    resets_by_default: ClassVar[bool] = False
    replaces_content: ClassVar[bool] = False
    causal_only: ClassVar[bool] = False
    reads_places: ClassVar[bool] = True
    tables: ClassVar[dict[str, Table]] = {}
    never_neutral: ClassVar[str] = ""
    takes_over: ClassVar[dict[str, Callable[[Any], dict[str, Tensor]]]] = {}
    elsewhere: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **rest: Any) -> None:
        """Let every scheme take what is for all that read positions."""
        super().__init_subclass__(**rest)
        cls.takes = cls.takes - DRAWING | (DRAWING if cls.reads_places else set())

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
    def reads_positions(cls) -> bool:
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
