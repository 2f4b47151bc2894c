"""Which layers of a model are kept (--encoder-layers-to-keep, --decoder-layers-to-keep), resolved before it is built.

fairseq leaves out layers while it loads tensors into a model that was built before, and saves the options of the
larger one. Here options and tensors are pruned together: `pruning_of` says what the options of the smaller model are,
in which every layer has the position scheme that it was trained with, and `prune_checkpoint` takes a checkpoint's
tensors there. Nothing else knows of layers to keep. LayerDrop: Fan et al. 2020, arXiv:1909.11556.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import OmegaConf, open_dict
from torch import Tensor

from relpos_fairseq.core.config import PositionConfig, members_of, scheme_of, shared_members, untaken
from relpos_fairseq.core.options import SCALE
from relpos_fairseq.core.plan import decode_text, encode_text
from relpos_fairseq.saved.identity import plain

SIDES = ("encoder", "decoder")
_LAYER = re.compile(r"(?P<stack>(encoder|decoder)\.(?P<roberta>sentence_encoder\.)?)layers\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class Kept:
    """The layers of an encoder or decoder that stay.

    Attributes:
        numbers: theirs, rising, from 0.
        total: how many there were.
        flag: the flag and its value, for messages.
    """

    numbers: tuple[int, ...]
    total: int
    flag: str

    def scheme(self, name: str) -> str:
        """Return the name of the position scheme, of which layer n has part n modulo their number, of those layers."""
        mine = self._parts(name)
        periods = (n for n in range(1, len(mine)) if all(part == mine[i % n] for i, part in enumerate(mine)))
        return "/".join(mine[: next(periods, len(mine))])

    def described(self, text: str) -> str:
        """Return `PositionPlan.describe` of those layers, from that of all."""
        before, *entries = text.split()
        name = self.scheme(before)
        order = [*(member.name for member in members_of(name)), "scale", "segments"]
        found = []
        for entry in entries:
            key, _, value = entry.partition("=")
            if key == "scale":
                scales = self._parts(value)[: len(name.split("/"))]
                entry = f"scale={'/'.join(scales if len(set(scales)) > 1 else scales[:1])}"
            if (owner := key.split(".")[0]) in order:
                found.append((order.index(owner), entry))
        return " ".join([name, *(entry for _, entry in sorted(found, key=lambda pair: pair[0]))])

    def _parts(self, text: str) -> list[str]:
        parts = [part.strip() for part in text.split("/")]
        return [parts[number % len(parts)] for number in self.numbers]


@dataclass(frozen=True)
class Pruning:
    """The layers that stay, by side, and the options that change."""

    kept: dict[str, Kept] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


NOTHING = Pruning()


def pruning_of(values: Mapping[str, Any]) -> Pruning:
    """Return which layers a model's options keep, and how the options of the model of these layers differ.

    Raises:
        ValueError: numbers that the model lacks, or that are none; or a scale that the schemes that stay do not take.
    """
    kept = {side: _kept(values, side) for side in SIDES if values.get(f"{side}_layers_to_keep") not in (None, "")}
    if not kept:
        return NOTHING
    options: dict[str, Any] = {}
    for side, layers in kept.items():
        options |= {f"{side}_layers": len(layers.numbers), f"{side}_layers_to_keep": None}
    return Pruning(kept, options | (_schemes(values, kept) if "position_scheme" in values else {}))


def _kept(values: Mapping[str, Any], side: str) -> Kept:
    text, total = str(values[f"{side}_layers_to_keep"]), values[f"{side}_layers"]
    flag = f"--{side}-layers-to-keep {text}"
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ValueError(f"{flag}: give the numbers of layers, from 0 and separated by commas, such as 0,2")
    numbers = sorted(int(number) for number in text.split(","))
    if len(set(numbers)) < len(numbers) or numbers[-1] >= total:
        raise ValueError(f"{flag}: give numbers of 0 to {total - 1}, each once (--{side}-layers is {total})")
    return Kept(tuple(numbers), total, flag)


def _schemes(values: Mapping[str, Any], kept: Mapping[str, Kept]) -> dict[str, str]:
    """Return the position schemes of the layers that stay, and `auto` for the options that only the others took."""
    config = _positions(values)
    sides = [side for side in SIDES if f"{side}_position_scheme" in values] or [""]
    options = {}
    for side, layers in kept.items():
        own = side if side in sides else ""
        options[f"{own}_position_scheme".lstrip("_")] = layers.scheme(scheme_of(config, own))
    lost = untaken(_positions({**values, **options}), sides).keys() - untaken(config, sides).keys()
    if SCALE in lost and float(scale := getattr(config, SCALE.field)) != 1:
        flags = " and ".join(layers.flag for layers in kept.values())
        raise ValueError(
            f"{flags}: these layers were trained with {SCALE.flag} {scale}, which a model whose position scheme is "
            f"{' and '.join(options.values())} does not take: keep a layer of another scheme too"
        )
    return options | {option.field: "auto" for option in lost}


def _positions(values: Mapping[str, Any]) -> Any:
    """Return the position flags among a model's options."""
    names = (part.name for part in fields(PositionConfig))
    return PositionConfig(**{name: str(values[name]) for name in names if values.get(name) is not None})


def build_model(original, cfg, task, *args, **kwargs):
    """Prune the options of a model of ours that fairseq builds: it saves them with the model."""
    pruning = _pruning_of_config(cfg)
    _write(cfg, pruning.options)
    model = original(cfg, task, *args, **kwargs)
    if pruning.kept:
        model.pruning = pruning  # of the checkpoint with which training begins
    return model


def pruning_of_checkpoint(checkpoint: Mapping[str, Any]) -> Pruning:
    """Return which layers a checkpoint's own options keep (--model-overrides), if its model is ours."""
    return _pruning_of_config((checkpoint.get("cfg") or {}).get("model"))


def _pruning_of_config(config: Any) -> Pruning:
    return pruning_of(_values(config)) if _name(config).startswith("relpos_") else NOTHING


def _name(config: Any) -> str:
    return str(getattr(config, "_name", None) or getattr(config, "arch", None))


def _values(config: Any) -> dict[str, Any]:
    """Return a config's options, with the defaults of those that a recipe of hydra or an old checkpoint lacks."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    known = MODEL_DATACLASS_REGISTRY.get(_name(config))
    return (vars(known()) if known else {}) | plain(config)


def _write(config: Any, options: Mapping[str, Any]) -> None:
    """Set options in a model's config, of any kind that fairseq builds from."""
    if OmegaConf.is_config(config):
        with open_dict(config):
            config.update(options)
    else:
        vars(config).update(options)


def prune_checkpoint(checkpoint: dict[str, Any], pruning: Pruning, path: str, resumes: bool) -> bool:
    """Leave out layers of a checkpoint, of its tensors and in its options, in place; tell whether it had them.

    Args:
        checkpoint: what fairseq loaded.
        pruning: which layers stay.
        path: its file, for messages.
        resumes: it may have as many layers as stay: it was pruned when the training of these flags began.

    Raises:
        ValueError: it has another number of layers.
    """
    found: dict[str, Kept] = {}
    asked: dict[str, Any] = {}
    for side, kept in pruning.kept.items():
        count = len({m["number"] for m in map(_LAYER.match, checkpoint["model"]) if m and _side(m) == side})
        if count != kept.total and not (resumes and count == len(kept.numbers)):
            raise ValueError(f"{kept.flag}: {path} has {count} layers, not {kept.total}: give --{side}-layers {count}")
        if count > len(kept.numbers):
            found[side] = kept
            asked |= {f"{side}_layers": count, f"{side}_layers_to_keep": ",".join(map(str, kept.numbers))}
    if found:
        config = checkpoint["cfg"]["model"]
        values = _values(config)
        extra = checkpoint.get("extra_state") or {}
        for state in (checkpoint["model"], extra.get("ema"), extra.get("ema_fp32_params")):
            for side, kept in found.items():
                _prune(state or {}, side, kept, _positions(values))
        _write(config, pruning_of(values | asked).options)
    return bool(found)


def _side(match: re.Match[str]) -> str:
    """Return the side that a layer's tensor belongs to; fairseq's first RoBERTas call their encoder a decoder."""
    return "encoder" if match["roberta"] else match[2]


def _prune(state: dict[str, Tensor], side: str, kept: Kept, config: Any) -> None:
    """Leave out tensors of an encoder's or decoder's layers, and of what only these shared, and renumber the others."""
    matches = {key: match for key in state if (match := _LAYER.match(key)) and _side(match) == side}
    stack = next((match["stack"] for match in matches.values()), f"{side}.")
    version, table = f"{stack}positions.scheme_version", f"{stack}window.table"
    left = {key: value for key, value in state.items() if key not in matches}
    for key, match in matches.items():
        if (number := int(match["number"])) in kept.numbers:
            left[f"{stack}layers.{kept.numbers.index(number)}.{key[match.end() :]}"] = state[key]
    if table in left:  # of --window-positions: a row for each layer
        left[table] = left[table][list(kept.numbers)]
    if version in left:
        described = decode_text(left[version])
        left[version] = encode_text(kept.described(described))
        name = described.split()[0]
        left = _renumber(
            left, f"{stack}positions.shared.", *(shared_members(config, n) for n in (name, kept.scheme(name)))
        )
    state.clear()
    state.update(left)


def _renumber(state: dict[str, Tensor], prefix: str, before: list[str], after: list[str]) -> dict[str, Tensor]:
    """Return a state in which what layers share stands where it is among fewer members; segments stand after them."""
    names = dict(enumerate(before))
    left = {}
    for key, value in state.items():
        if key.startswith(prefix):
            number, rest = key.removeprefix(prefix).split(".", 1)
            name = names.get(int(number))
            if name is not None and name not in after:
                continue
            moved = int(number) - len(before) + len(after) if name is None else after.index(name)
            key = f"{prefix}{moved}.{rest}"
        left[key] = value
    return left
