"""What a released `model.pt` holds: the whole module as torch.save pickles it, or its state_dict.

    word_emb.emb_layers.i.weight, emb_projs.i         bands of the (adaptive) embedding
    layers.n.dec_attn.{qkv_net, o_net, layer_norm}    r_net too where attn_type is 0; q_net and
                                                      kv_net for qkv_net where it is 2 or 3
    layers.n.pos_ff.{CoreNet.0, CoreNet.3, layer_norm}
    r_w_bias, r_r_bias (0);  r_emb, r_w_bias, r_bias (1);  r_emb (3)
    crit.out_layers.i, out_projs.i, cluster_{weight, bias}

`attn_type` 0 is the paper's attention, 1 learns vectors and scalars of distances instead; 2 and 3
add absolute positions to layers' inputs and, anew in every segment, to memory
(`models/transformer_xl/window_positions.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.released_xl.inert import read_inert, tensors_of
from relpos_fairseq.conversion.report import ConversionError

MARKS = (b"word_emb", b"emb_layers", b"dec_attn")  # names in a pickle of either kind
HEAD = 1 << 22  # bytes that hold names; numbers follow them


@dataclass(frozen=True)
class Released:
    """A released model.

    Attributes:
        path: its file.
        state: tensors under the names above.
        heads: attention heads.
        attn_type: 0 to 3.
        cutoffs: of the adaptive softmax, without the number of types; empty: a plain one.
        mem_len: most states that it remembers; None: the file does not say.
        segment: tokens of a segment; None: the file does not say.
        clamp_len: distances beyond it read the same row or sinusoid; 0: none.
        same_length: every token sees mem_len tokens.
        pre_norm: layer norm before blocks (pre_lnorm).
        dropout: probability, of attention's probabilities dropatt.
        notes: what a state_dict does not say, and is taken to be.
    """

    path: Path
    state: dict[str, Tensor]
    heads: int
    attn_type: int
    cutoffs: tuple[int, ...] = ()
    mem_len: int | None = None
    segment: int | None = None
    clamp_len: int = 0
    same_length: bool = False
    pre_norm: bool = False
    dropout: tuple[float, float] = (0.1, 0.0)
    notes: list[str] = field(default_factory=list)

    @property
    def absolute(self) -> bool:
        """Whether it adds absolute positions to memory and segment."""
        return self.attn_type > 1

    @property
    def layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.state if name[:7] == "layers.")

    @property
    def reach(self) -> int:
        """Tokens of segment and memory together."""
        return (self.segment or 0) + (self.mem_len or 0)

    @property
    def width(self) -> int:
        return len(self.state["layers.0.dec_attn.o_net.weight"])

    @property
    def bands(self) -> list[tuple[int, int]]:
        """First type and the one after the last of each band of the softmax."""
        ends = [0, *self.cutoffs, self.types]
        return list(zip(ends, ends[1:], strict=False))

    def band_width(self, number: int) -> int:
        tables = embeddings(self.state)
        return tables[number if len(tables) > 1 else 0].size(1)

    @property
    def types(self) -> int:
        return sum(map(len, embeddings(self.state)))


def embeddings(state: dict[str, Tensor]) -> list[Tensor]:
    """Return the embeddings of all bands, or the one that they have in common."""
    names = (f"word_emb.emb_layers.{number}.weight" for number in range(len(state)))
    return [state[name] for name in names if name in state]


def projections(released: Released, layer: int) -> list[Tensor]:
    """Return the weights (width, width) of a layer's queries, keys and values."""
    names = ("q_net", "kv_net") if released.absolute else ("qkv_net",)
    weights = [released.state[f"layers.{layer}.dec_attn.{name}.weight"] for name in names]
    return list(torch.cat(weights).chunk(3))


def is_released(path: Path) -> bool:
    """Tell whether a file's pickle names the released model's tensors; nothing is unpickled."""
    if not path.is_file():
        return False
    with path.open("rb") as file:  # torch compresses no file of its archives
        head = file.read(HEAD)
    return all(mark in head for mark in MARKS)


def read_released(path: Path) -> Released:
    """Read a released model without running its code.

    Raises:
        ConversionError: it is truncated, or of a kind that is not converted.
    """
    found = read_inert(path)
    while not isinstance(found, dict) and "module" in getattr(found, "_modules", {}):
        found = found._modules["module"]  # as FP16_Module and DataParallel wrap it
    try:
        if isinstance(found, dict):
            found = {name.removeprefix("module."): value for name, value in found.items()}
            released = _of_state(path, found)
        else:
            released = _of_module(path, found)
        _check(released)
    except (KeyError, AttributeError, TypeError) as error:
        raise ConversionError(
            f"{path} is no whole released Transformer-XL ({error}): give the model.pt of its train.py"
        ) from None
    return released


def _of_module(path: Path, module: Any) -> Released:
    state, said = tensors_of(module), vars(module)
    crit, layers = module._modules.get("crit"), module._modules["layers"]._modules
    attention = layers["0"]._modules["dec_attn"]
    return Released(
        path=path,
        state=state,
        heads=int(said["n_head"]),
        attn_type=int(said.get("attn_type", 0)),
        cutoffs=tuple(getattr(crit, "cutoffs", ()))[:-1],
        mem_len=int(said.get("mem_len") or 0),
        segment=int(said.get("tgt_len") or 0) or None,
        clamp_len=max(int(said.get("clamp_len") or 0), 0),
        same_length=bool(said.get("same_length")),
        pre_norm=bool(getattr(attention, "pre_lnorm", False)),
        dropout=(float(module._modules["drop"].p), float(attention._modules["dropatt"].p)),
    )


def _of_state(path: Path, state: dict[str, Any]) -> Released:
    kind = 0 if "r_r_bias" in state else 1 if "r_bias" in state else 3 if "r_emb" in state else 2
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    cutoffs = tuple(itertools.accumulate(map(len, embeddings(tensors))))[:-1]
    if not cutoffs and "crit.cluster_weight" in tensors:
        raise ConversionError(f"{path}: a state_dict does not say its cut-offs: {_WHOLE}")
    note = "a state_dict says neither memory, clamp_len, same_length nor pre_lnorm: none is taken"
    heads = tensors["r_w_bias"].size(-2) if "r_w_bias" in tensors else 1
    return Released(path, tensors, heads, kind, cutoffs, notes=[f"{note} ({_WHOLE})"])


_WHOLE = "give the whole module, as its train.py saves it"


def _check(released: Released) -> None:
    """Refuse what is not converted.

    Raises:
        ConversionError: names the file and why.
    """
    path, state = released.path, released.state
    if not embeddings(state) or "crit.out_layers.0.bias" not in state:
        raise KeyError("its embedding or crit.out_layers")
    if released.absolute:
        _check_absolute(released)
    width, inner = state["layers.0.dec_attn.o_net.weight"].shape
    if width != inner:
        raise ConversionError(
            f"{path}: {released.heads} heads of {inner // released.heads} are {inner} channels, "
            f"and the model has {width}: ours divides the width among the heads"
        )


def _check_absolute(released: Released) -> None:
    """Refuse absolute positions that ours do not say.

    Raises:
        ConversionError: names the file and why.
    """
    if not released.segment:
        refused = f"does not say its segment and memory, which its positions need: {_WHOLE}"
    elif released.pre_norm:
        refused = (
            "has pre_lnorm, under which its queries, unlike its keys and values, read the layer's "
            "input without layer norm: give a model without"
        )
    elif released.attn_type == 2 and 0 < released.clamp_len < released.reach - 1:
        refused = (
            f"clamps positions at {released.clamp_len}, short of its segment and memory of "
            f"{released.reach}: give a model without clamp_len"
        )
    else:
        return
    raise ConversionError(f"{released.path} has attn_type {released.attn_type} and {refused}")
