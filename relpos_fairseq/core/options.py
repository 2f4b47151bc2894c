"""Options of position schemes, and the shape of the attention that a scheme serves.

An `Option` is one flag: its name, its help, the values that it takes, and what `auto` means.  An option
of one scheme alone is declared in that scheme's file; options of several schemes are declared here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar


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
        if self.max_positions < 1:
            raise ValueError(f"{self.length_flag} must be >= 1, got {self.max_positions}")
        if self.num_heads < 1 or self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim must be divisible by the number of heads, got embed_dim "
                f"{self.embed_dim} and {self.num_heads} heads"
            )

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Option:
    """One flag that schemes take.

    Args:
        name: its name in schemes and checkpoints.
        place: sorts the flags of --help, those of one number by name.
        help: what it does, without the schemes that take it.
        auto: the value of `auto`, which may depend on the attention.
        auto_help: `auto` in words; None: its value.
        prefix: prefix of its flag, before the name.
        remembered: whether a checkpoint remembers it, and a resume must repeat it.
        later: it was added when checkpoints existed: they do not mention it where it is `auto`.
        afterwards: it may be changed after training from `auto`; implies `later`.
        training_only: it acts in training alone, so that conversion does not take it.
    """

    name: str
    place: int
    help: str
    auto: Any | Callable[[AttentionShape], Any]
    auto_help: str | None = None
    prefix: str = "position_"
    remembered: bool = True
    later: bool = False
    afterwards: bool = False
    training_only: bool = False

    @property
    def field(self) -> str:
        """Name of the flag in a config."""
        return self.prefix + self.name

    @property
    def auto_text(self) -> str:
        """The value of `auto` in --help; "": it is not mentioned."""
        if self.auto_help is not None:
            return self.auto_help
        return self.auto if isinstance(self.auto, str) else f"{self.auto:g}"

    @property
    def metavar(self) -> str:
        """What follows the flag in --help."""
        return "X"

    @property
    def flag(self) -> str:
        return f"--{self.field.replace('_', '-')}"

    def read(self, text: str, shape: AttentionShape) -> Any:
        """Return the value of a text that the user gave.

        Raises:
            ValueError: the text is no value of this option.
        """
        raise NotImplementedError(f"{type(self).__name__} must define read")

    def value(self, text: str | None, shape: AttentionShape) -> Any:
        """Return the value of a text that the user gave, or (None) of `auto`."""
        if text is not None:
            return self.read(text, shape)
        return self.auto(shape) if callable(self.auto) else self.auto

    def check(self, scheme: str) -> None:
        """Raise a ValueError, which names the scheme that takes it, for a declaration that cannot be."""
        start = f"position scheme {scheme}: option {self.name!r}"
        if not self.name.isidentifier():
            raise ValueError(f"{start}: a name has letters, digits and _, and begins with a letter")
        if callable(self.auto):
            if self.auto_help is None:
                raise ValueError(f"{start}: auto is a function: say in auto_help what it means")
        elif self.auto is not None and not self.may_be(self.auto):
            raise ValueError(f"{start} has auto={self.auto!r}: give {self.values}, or None")

    @property
    def values(self) -> str:
        """What a user may give, in words."""
        return "a value"

    def may_be(self, value: Any) -> bool:
        """Tell whether a value is one that `read` may return."""
        return True

    def memory(self, value: Any, shape: AttentionShape) -> str | None:
        """Return a checkpoint's entry for a value, or None where it has none."""
        later = self.later or self.afterwards
        if not self.remembered or (later and value == self.value(None, shape)):
            return None
        return f"{self.name}={value}"


@dataclass(frozen=True, kw_only=True)
class Number(Option):
    """A whole number.

    Args:
        least: the smallest value, which may depend on the attention.
    """

    least: int | Callable[[AttentionShape], int] = 0

    @property
    def metavar(self) -> str:
        return "N"

    @property
    def values(self) -> str:
        return "a whole number" if callable(self.least) else f"a whole number >= {self.least}"

    def may_be(self, value: Any) -> bool:
        return type(value) is int and (callable(self.least) or value >= self.least)

    def read(self, text: str, shape: AttentionShape) -> int:
        least = self.least(shape) if callable(self.least) else self.least
        value: int | None
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            kind = "a whole number " if value is None else ""
            raise ValueError(f"{self.name} must be {kind}>= {least}, got {text} ({self.flag})")
        return value


@dataclass(frozen=True, kw_only=True)
class Factor(Option):
    """A positive number."""

    values = "a number > 0"

    def may_be(self, value: Any) -> bool:
        return type(value) in (int, float) and 0 <= value < float("inf")  # 0: none, which is `auto` alone

    def read(self, text: str, shape: AttentionShape) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ValueError(f"{self.name} must be > 0, got {text} ({self.flag})")
        return value


@dataclass(frozen=True, kw_only=True)
class Factors(Option):
    """Several positive numbers, joined by commas."""

    values = "numbers > 0, joined by commas"
    metavar = "X,X"

    def may_be(self, value: Any) -> bool:
        return isinstance(value, tuple) and all(type(one) in (int, float) and 0 < one < float("inf") for one in value)

    def read(self, text: str, shape: AttentionShape) -> tuple[float, ...]:
        with suppress(ValueError):
            values = tuple(map(float, text.split(",")))
            if all(0 < value < float("inf") for value in values):
                return values
        raise ValueError(f"{self.name} must be numbers > 0, joined by commas, got {text} ({self.flag})")

    def memory(self, value: tuple[float, ...] | None, shape: AttentionShape) -> str | None:
        """Return a checkpoint's entry, which reads as the flag does."""
        return super().memory(value, shape) and f"{self.name}={','.join(map(repr, value or ()))}"


@dataclass(frozen=True, kw_only=True)
class Choice(Option):
    """One of some words, by default on or off.

    Args:
        choices: the words.
    """

    choices: tuple[str, ...] = ("on", "off")

    def check(self, scheme: str) -> None:
        if not (isinstance(self.choices, tuple) and len(self.choices) > 1):
            raise ValueError(
                f"position scheme {scheme}: option {self.name!r} has choices={self.choices!r}: "
                f"give a tuple of two words at least"
            )
        super().check(scheme)

    @property
    def metavar(self) -> str:
        words = "|".join(self.choices)
        return words if len(words) < 40 else "WORD"  # a line of --help is 80 columns; `help` names them

    @property
    def values(self) -> str:
        return f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"

    def may_be(self, value: Any) -> bool:
        return value in self.choices

    def read(self, text: str, shape: AttentionShape) -> str:
        if text not in self.choices:
            raise ValueError(f"{self.flag} must be auto, {self.values}, got {text}")
        return text


def in_order(options: Iterable[Option]) -> tuple[Option, ...]:
    """Sort options as --help and checkpoints have them."""
    return tuple(sorted(options, key=lambda option: (option.place, option.name)))


READ = ("name", "place", "help", "prefix", "training_only", "choices")  # by declared_options: they must be literals


def declared_options() -> tuple[Option, ...]:
    """List every option in the order of --help, without `auto` and bounds, and without importing a scheme.

    A scheme's file imports torch, which no command's --help should wait for.  The declarations
    (`NEAR = Number(name="near", place=110, ...)`) are therefore read from the sources; the fields that are
    read here must be literals.
    """
    here = Path(__file__).parent
    kinds = {kind.__name__: kind for kind in (Number, Factor, Factors, Choice)}
    found = []
    for file in (Path(__file__), here / "rotation.py", *(here.parent / "schemes").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            call = getattr(node, "value", None)
            if isinstance(call, ast.Call) and (kind := kinds.get(getattr(call.func, "id", ""))):
                try:
                    read = {part.arg: ast.literal_eval(part.value) for part in call.keywords if part.arg in READ}
                    found.append(kind(auto=None, **read))
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"{file}, line {node.lineno}: an option's name, place, help and choices are literals, which "
                        f"relpos convert --help reads from this file ({error})"
                    ) from error
    return in_order(found)


class SchemeOptions(SimpleNamespace):
    """Resolved options by name: those below, which every scheme reads, and those that a scheme declares.

    Args:
        clip_distance: tables cover -K..K; 0 = all of max_positions.
        share: who has one table in common: none, heads, layers or both.
        scale: C in 1/sqrt(C * head_dim).
        reset_cls: whether the first token's row and column are reset.
        num_segments: number of segments, for segment encodings.
        init: where tables start: own (the scheme's), paper or neutral.
        given: options by name, those that the scheme declares among them.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "clip_distance": 0,
        "share": "none",
        "scale": 1.0,
        "reset_cls": False,
        "num_segments": 2,
        "init": "own",
    }

    def __init__(self, **given: Any) -> None:
        super().__init__(**self.DEFAULTS | given)


# Options of several schemes.  `config` resolves their `auto`, by scheme, hybrid and model.
CLIP_DISTANCE = Number(
    name="clip_distance",
    place=10,
    help="tables cover distances -K..K and are read at their ends beyond; 0: no clipping",
    auto=0,
    auto_help="by scheme and model",
)
SHARE = Choice(
    name="share",
    place=20,
    help="who has one table in common: none, heads (of a layer), layers (per head) or both",
    auto="none",
    auto_help="the paper's",
    choices=("none", "heads", "layers", "both"),
)
RANDOM_RANGE = Number(
    name="random_range",
    place=25,
    help="L: in training each batch draws its positions, in rising order, from 0..L-1; 0: never",
    auto=0,
    auto_help="",
    remembered=False,
)
RANDOM_AT = Choice(
    name="random_at",
    place=26,
    help="positions are drawn in training, or always: one draw a length in evaluation (encoders)",
    auto="training",
    choices=("training", "always"),
    remembered=False,
)
RANDOMIZATION = frozenset({RANDOM_RANGE, RANDOM_AT})
SCALE = Factor(
    name="scale", place=30, help="C in 1/sqrt(C * head_dim) instead of the scheme's own", auto=1.0, auto_help=""
)
SCALAR_GAIN = Factor(
    name="scalar_gain",
    place=75,
    help="learned scalars are stored divided by G: an update of Adam, which moves a parameter by "
    "the learning rate, moves logits G times as far; initial logits stay",
    auto=1.0,
    later=True,
)
RESET_CLS = Choice(
    name="reset_cls",
    place=40,
    help="on: the first token's row and column of the position logits become learned scalars, in encoders",
    auto="off",
    auto_help="on where the paper has it",
)
INIT = Choice(
    name="init",
    place=45,
    help="tables start as the table of schemes says (own), as in the paper or its code (paper; N(0, 0.02) where "
    "neither says) or where they change least of the logits (neutral)",
    auto="own",
    choices=("own", "paper", "neutral"),
    remembered=False,
    training_only=True,
)
PROJECTIONS = Choice(
    name="projections",
    place=55,
    help="of the vectors of positions: own, one (the query's and the key's are one) or content "
    "(those of the layer's queries and keys)",
    auto="own",
    choices=("own", "one", "content"),
    later=True,
)


def only(option: Option, value: str, choices: tuple[str, ...], scheme: str) -> None:
    """Raise an error for an option's value that this scheme does not have.

    Raises:
        ValueError: names the option, its value and those that the scheme has.
    """
    if value not in choices:
        raise ValueError(f"{option.flag} of {scheme} must be {' or '.join(choices)}, got {value}")
