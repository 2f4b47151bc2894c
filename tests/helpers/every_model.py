"""Small models of each kind, what they are given, and where their output counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from helpers.lm_models import small_lm, small_xl, stream
from helpers.models import batch, small_model
from helpers.roberta import small_roberta, tokens

PADDING = 1
Made = tuple[nn.Module, dict[str, Any], Tensor]


def translation(scheme: str, **values: Any) -> Made:
    """A model, its inputs, and where its output counts."""
    sides = {"position_scheme": scheme}
    if scheme == "cope":  # which no encoder has
        sides = {"encoder_position_scheme": "none", "decoder_position_scheme": scheme}
    source, target = batch()
    given = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target}
    return small_model(**sides, **values), given, target.ne(PADDING)


def language_model(scheme: str, **values: Any) -> Made:
    """The same of a decoder alone."""
    return small_lm(position_scheme=scheme, **values), {"src_tokens": stream()}, stream().ne(PADDING)


def recurrent(scheme: str, **values: Any) -> Made:
    """The same with memory."""
    model = small_xl(position_scheme=scheme, **values)
    memory = model(stream(2, 5, seed=1))[1]["memory"]
    return model, {"src_tokens": stream(), "memory": memory}, stream().ne(PADDING)


def roberta(scheme: str, **values: Any) -> Made:
    """The same of an encoder alone."""
    ids = tokens()
    return small_roberta(position_scheme=scheme, **values), {"src_tokens": ids}, ids.ne(PADDING)
