"""Register the named sizes of a model, and tell fairseq a model's longest input."""

from __future__ import annotations

import dataclasses
from dataclasses import fields, make_dataclass
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model

from relpos_fairseq.placement import Placement

# ---- A model's named sizes: a class and a config each, as fairseq keeps a config on the class.


def sized(name: str, base: type[FairseqDataclass], **values: Any) -> type[FairseqDataclass]:
    """Make the config class of a named size, whose defaults are `values`.

    Raises:
        ValueError: if a value names no field.
    """
    known = {part.name: part for part in fields(base)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{name}: unknown fields {', '.join(unknown)}")
    changed = [
        (key, known[key].type, dataclasses.field(default=value, metadata=known[key].metadata))
        for key, value in values.items()
    ]
    return make_dataclass(name, changed, bases=(base,))


def widths(side: str, width: int, ffn: int, heads: int, layers: int) -> dict[str, int]:
    """Return the fields of an encoder's or a decoder's sizes."""
    return {
        f"{side}_embed_dim": width,
        f"{side}_ffn_embed_dim": ffn,
        f"{side}_attention_heads": heads,
        f"{side}_layers": layers,
    }


def add_flags(model: type, parser: Any) -> None:
    """Add every field of a model's config, whose defaults are the config's, not argparse's."""
    config = getattr(model, "flags", None) or getattr(model, "__dataclass")  # noqa: B009
    gen_parser_from_dataclass(parser, config(), delete_default=True)


def register_sizes(
    model: type, base: type[FairseqDataclass], sizes: dict[str, dict[str, Any]], module: str
) -> dict[str, type]:
    """Register a class and a config for every size.

    Args:
        model: the model that every size's class derives from.
        base: its config.
        sizes: by name, the defaults in which a size differs from `base`.
        module: whose names the returned classes become: pickle looks for them there.
    """
    made = {}
    for name, values in sizes.items():
        title = "".join(part.capitalize() for part in name.split("_"))
        config = base
        if values:
            config = sized(f"{title}Config", base, **values)
            config.__module__ = module
        named = {"__doc__": f"`{name}`.", "__module__": module}
        made[title] = type(title, (model,), named)
        made[config.__name__] = config
        register_model(name, dataclass=config)(made[title])
    return made


# ---- The longest input of a model, as fairseq asks for it.


UNLIMITED = 2**31 - 1  # where positions set no limit


class TableLimit(int):
    """A longest length that remembers which scheme's table sets it, for error messages."""

    scheme: str

    @classmethod
    def of(cls, length: int, scheme: str) -> TableLimit:
        limit = cls(length)
        limit.scheme = scheme
        return limit


def limit_of(placement: Placement) -> int:
    """Return the longest input, as fairseq asks for it."""
    longest = placement.plan.longest
    return UNLIMITED if longest is None else TableLimit.of(longest, placement.plan.name)
