"""What transformers' callers see or replace inside an encoder or decoder: hooks for the time of a call.

`recording` keeps states and probabilities, `embedded` replaces embeddings, `limited` masks pairs of tokens. No forward
of our models knows of them, so that a call without them costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.terms import DenseBias, PositionTerms


def all_layers(stack: Any) -> list[Any]:
    """Return the layers of an encoder or decoder; an iterator would leave out layers at random under LayerDrop."""
    return [stack.layers[number] for number in range(len(stack.layers))]


class Recorded:
    """What the layers of an encoder or decoder computed, in any number of passes over successive tokens."""

    def __init__(self, layers: int) -> None:
        self.hidden: list[list[Tensor]] = [[] for _ in range(layers + 1)]  # (B, T, E) of each pass
        self.attentions: list[list[Tensor]] = [[] for _ in range(layers)]  # (B, H, T, S)
        self.cross: list[list[Tensor]] = [[] for _ in range(layers)]  # (H, B, T, S)

    def outputs(self, length: int, new: int) -> dict[str, tuple[Tensor, ...] | None]:
        """Return hidden states (B, T, E), probabilities (B, H, T, L) and (B, H, T, S) of the last `new` of L tokens."""
        hidden = tuple(joined(part, new, 1) for part in self.hidden if part)
        own = tuple(joined(widened(part, length), new, 2) for part in self.attentions if part)
        cross = tuple(joined([one.transpose(0, 1) for one in part], new, 2) for part in self.cross if part)
        found = {"hidden_states": hidden or None, "attentions": own or None}
        return found | ({"cross_attentions": cross} if cross else {})


def joined(parts: list[Tensor], new: int, axis: int) -> Tensor:
    """Return the last `new` entries of the parts' along an axis; one part itself, so that it has a gradient."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
    return whole if whole.size(axis) == new else whole.narrow(axis, whole.size(axis) - new, new)


def widened(parts: list[Tensor], length: int) -> list[Tensor]:
    """Return probabilities (B, H, T, S) of passes over the last of L tokens, each up to its end, as (B, H, T, L)."""
    end, found = length - sum(part.size(2) for part in parts), []
    for part in parts:
        end += part.size(2)
        beside = (end - part.size(3), length - end)
        found.append(nn.functional.pad(part, beside) if any(beside) else part)
    return found


@contextlib.contextmanager
def recording(stack: Any, *, hidden: bool, attentions: bool) -> Iterator[Recorded]:
    """Yield a `Recorded` that the layers of an encoder or decoder fill in the `with` block.

    The last hidden states are those after the last layer norm. Attention is evaluated by a backend that has
    probabilities, and layers whose probabilities are kept are not recomputed.
    """
    layers, hooks = all_layers(stack), contextlib.ExitStack()
    found = Recorded(len(layers))

    def weigh(module: nn.Module, at: list[Tensor], **how: bool) -> None:
        """Append the probabilities of an attention to a list."""
        ask = module.register_forward_pre_hook(lambda _, given, named: (given, named | how), with_kwargs=True)
        hooks.enter_context(ask)
        hooks.enter_context(module.register_forward_hook(lambda _module, _given, output: at.append(output[1])))

    def keep(at: list[Tensor], output: Any) -> Any:
        """Append states (T, B, E) to a list as (B, T, E), and return them, or the layer's output, computed of these."""
        states, *others = output if isinstance(output, tuple) else (output,)
        at.append(states.transpose(0, 1))
        states = at[-1].transpose(0, 1)
        return (states, *others) if isinstance(output, tuple) else states

    with hooks:
        if hidden and layers:
            first = layers[0].register_forward_pre_hook(lambda _, given: (keep(found.hidden[0], given[0]), *given[1:]))
            hooks.enter_context(first)
            last = layers[-1] if stack.layer_norm is None else stack.layer_norm
            for module, at in zip([*layers[:-1], last], found.hidden[1:], strict=True):
                take = module.register_forward_hook(lambda _module, _given, output, at=at: keep(at, output))
                hooks.enter_context(take)
        for number, layer in enumerate(layers if attentions else ()):
            hooks.callback(setattr, layer, "checkpoint_activations", layer.checkpoint_activations)
            hooks.callback(setattr, layer.self_attn, "backend", layer.self_attn.backend)
            layer.checkpoint_activations, layer.self_attn.backend = False, "auto"
            weigh(layer.self_attn, found.attentions[number], need_weights=True)
            if getattr(layer, "encoder_attn", None) is not None:
                weigh(layer.encoder_attn, found.cross[number], need_weights=True, need_head_weights=True)
        yield found


@contextlib.contextmanager
def embedded(module: nn.Module, embeds: Tensor | None) -> Iterator[None]:
    """Let an embedding return `embeds` (B, L, E), passes over successive tokens the next of them; None: its own."""
    if embeds is None:
        yield
        return
    done = 0

    def replaced(_module: nn.Module, given: tuple, _output: Any) -> Tensor:
        nonlocal done
        done += given[0].size(1)
        return embeds[:, done - given[0].size(1) : done]

    with module.register_forward_hook(replaced):
        yield


@contextlib.contextmanager
def limited(stack: Any, mask: Tensor | None) -> Iterator[None]:
    """Let each token attend to those where its row of `mask` (B, L, L) is not 0; None: to all."""
    if mask is None:
        yield
        return
    bias = mask.new_zeros(mask.shape, dtype=torch.float32).masked_fill_(mask == 0, torch.finfo(torch.float32).min)
    term = PositionTerms(dense_bias=DenseBias(lambda own, places: places.query_rows(own[0], axis=2), (bias[:, None],)))

    def ask(layer: Any, given: tuple, named: dict) -> tuple[tuple, dict]:
        context = named["context"].of_layer(layer.self_attn.position.layer)
        return given, named | {"context": replace(context, shared=(*context.shared, term))}

    with contextlib.ExitStack() as hooks:
        for layer in all_layers(stack):
            hooks.enter_context(layer.register_forward_pre_hook(ask, with_kwargs=True))
        yield
