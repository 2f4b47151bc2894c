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

from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Clipped
from relpos_fairseq.terms import PositionTerms, Reset


class PositionMismatchError(ValueError):
    """A checkpoint was trained under another position scheme than the model has."""


@dataclass(frozen=True)
class SchemeOptions:
    """Options with every `auto` resolved; a scheme reads those that it `takes`.

    Args:
        clip_distance: table covers -K..K; 0 = all of max_positions.
        share: who has one table in common: none, heads, layers or both.
        scale: C in 1/sqrt(C * head_dim).
        reset_cls: whether the first token's row and column are reset.
        rank: rank of abs_scalar's factors.
        buckets: number of T5 buckets.
        max_distance: distance at which T5's last bucket begins.
        query_bias: transformer_xl's u and v: `on` (a layer's own), `shared` (by all layers), `off`.
        p2c_index: `paper` or `mirrored`, for deberta.
        num_segments: number of segments, for segment encodings.
        clamp_len: distance beyond which transformer_xl's sinusoid no longer changes; 0 = none.
    """

    clip_distance: int = 16
    share: str = "none"
    scale: float = 1.0
    reset_cls: bool = False
    rank: int = 0
    buckets: int = 32
    max_distance: int = 128
    query_bias: str = "on"
    p2c_index: str = "paper"
    num_segments: int = 2
    clamp_len: int = 0


@dataclass(frozen=True)
class AttentionShape:
    """The attention that a scheme serves.

    Args:
        embed_dim: width E of the model.
        num_heads: number of heads H.
        max_positions: longest trained input, which sizes absolute and unclipped tables.
        causal: a decoder, whose queries never see the future.
        length_flag: the flag that raises max_positions, for error messages.
        seed_name: where the scheme stands (`encoder.3`), which seeds its initial values.
    """

    embed_dim: int
    num_heads: int
    max_positions: int
    causal: bool = False
    length_flag: str = "--max-positions"
    seed_name: str = ""

    def __post_init__(self) -> None:
        """Refuse widths that heads cannot divide."""
        if self.num_heads < 1 or self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be divisible by the number of heads, got embed_dim "
                f"{self.embed_dim} and {self.num_heads} heads"
            )

    @property
    def head_dim(self) -> int:
        """Width D of a head."""
        return self.embed_dim // self.num_heads


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
    """Base of every scheme.  Class attributes say what a scheme is.

    Attributes:
        name: the scheme's name on the command line.
        card: its row in the contract table.
        takes: options (fields of SchemeOptions) that it accepts, `scale` included.
        own_scale: C in the published 1/sqrt(C * head_dim); None: acts on the input alone.
        default_share: sharing in the paper; None where there is nothing to share.
        clip: `vectors` or `scalars`, which decides the clip distance that `auto` means, `all` for
            tables that are never clipped, or None.
        absolute: reads absolute positions, hence has a longest input and carries no memory.
        counts_sentences: reads positions counted from each sentence's start.
        table_limited: refuses input longer than max_positions.
        rotates: transforms queries and keys.
        resets_by_default: what --position-reset-cls auto means in an encoder.
        replaces_content: has a trilinear term.
    """

    name: ClassVar[str]
    card: ClassVar[SchemeCard]
    takes: ClassVar[frozenset[str]] = frozenset({"scale"})
    own_scale: ClassVar[float | None] = 1.0
    default_share: ClassVar[str | None] = None
    clip: ClassVar[str | None] = None
    absolute: ClassVar[bool] = False
    counts_sentences: ClassVar[bool] = False
    table_limited: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    resets_by_default: ClassVar[bool] = False
    replaces_content: ClassVar[bool] = False

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Keep shape and options; subclasses add their tables."""
        super().__init__()
        self.shape = shape
        self.options = options
        if options.reset_cls:
            self.theta = nn.Parameter(torch.zeros(2, self.table_heads))

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
    def clipped(self) -> Clipped:
        """The relation of a table over clipped distances."""
        reach = self.options.clip_distance or max(self.shape.max_positions - 1, 1)
        return Clipped(reach, reach)

    def draw(self, *size: int, std: float, mean: float = 0.0) -> nn.Parameter:
        """A parameter drawn from N(mean, std) without touching the global random state.

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
        """The reset of the first token's row and column, where it is switched on."""
        if not self.options.reset_cls:
            return None
        return Reset(self.theta[0], self.theta[1], positions.first_slot())

    def initialize_projections(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Called once after the model's own initialisation; M4M alone sets the biases."""

    def embed(self, positions: Positions) -> Tensor | None:
        """(B|1, T, E) added to the embedding of the queries' tokens, or None."""
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
        """What the scheme's relations contribute."""
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
