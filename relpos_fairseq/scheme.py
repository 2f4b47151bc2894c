"""PositionScheme: one published way to tell a transformer where its tokens stand.

A scheme declares terms over relations; it never forms an attention matrix.  What it may do, in the
order in which a forward pass asks:

1. `embed(positions)`: what is added to the input embedding;
2. `prepare(positions)`: everything free of content, once a forward pass and cached in decoding;
3. `transform_query`, `transform_key`: rotate the content (RoPE);
4. `terms(prepared, positions)`: what its relations contribute to logits and output.

Row rule: whatever concerns query row i depends on q_i, the keys and `positions` alone.  Blocks,
caching and memory are right because of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relpos_fairseq.options import SCALE, AttentionShape, Option, SchemeOptions
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Clipped, Relation
from relpos_fairseq.tables import RESET_TABLE, Table
from relpos_fairseq.terms import PositionTerms, Reset


class PositionMismatchError(ValueError):
    """A checkpoint was trained under another position scheme than the model has."""


@dataclass(frozen=True)
class SchemeCard:
    """A scheme's row in the contract table (README, `scripts/scheme_table.py`).

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
        resets_by_default: what --position-reset-cls auto means in an encoder.
        replaces_content: has a trilinear term.

    For conversion:
        tables: its parameters, by name.
        never_neutral: why no values of its tables leave the logits as they are; "": some do.
        takes_over: by the name of a scheme, how that one's parameters become this one's, as far as
            equal terms go; by its own name, what its options change.
        fitted: the table that the logits are linear in, which least squares may fit.
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
    resets_by_default: ClassVar[bool] = False
    replaces_content: ClassVar[bool] = False
    tables: ClassVar[dict[str, Table]] = {}
    never_neutral: ClassVar[str] = ""
    takes_over: ClassVar[dict[str, Callable[[Any], dict[str, Tensor]]]] = {}
    fitted: ClassVar[str | None] = None
    elsewhere: ClassVar[dict[str, str]] = {}

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        super().__init__()
        self.shape = shape
        self.options = options
        if options.reset_cls:
            self.theta = nn.Parameter(torch.zeros(2, self.table_heads))

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

    @property
    def common_parameters(self) -> tuple[str, ...]:
        """Names of parameters that the instances of all layers have in common."""
        return ()

    @property
    def table_heads(self) -> int:
        """First dimension of every table: 1 where heads share it, else H."""
        return 1 if self.options.share in ("heads", "both") else self.shape.num_heads

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

    def draw(self, *size: int, std: float, mean: float = 0.0) -> nn.Parameter:
        """Draw a parameter from N(mean, std) without touching the global random state.

        The stream depends on the global seed, where the scheme stands and what was drawn before,
        so that choosing a scheme changes no other parameter's initial value.
        """
        values = torch.randn(*size, generator=self._generator()) * std + mean
        return nn.Parameter(values)

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
        if not self.table_limited or positions.src_len <= self.shape.max_positions:
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

    def transform_query(self, q: Tensor, prepared: Any, start: int) -> Tensor:
        """Transform q (B, H, T, D), whose first row stands at slot `start`."""
        return q

    def transform_key(self, k: Tensor, prepared: Any, start: int) -> Tensor:
        """Transform k (B, H, S, D), whose first row stands at slot `start`."""
        return k

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return what the scheme's relations contribute."""
        return ()

    def factor(self, q: Tensor, k: Tensor) -> Tensor:
        """Return what a row of the `fitted` table is multiplied by in the logits.

        Args:
            q: (B, H, P, D) queries of P pairs.
            k: (B, H, P, D) their keys.

        Returns:
            (B, H, P, D), or (B, H, P, 1) for a table of scalars.
        """
        raise NotImplementedError(f"{type(self).__name__} must define factor")


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
