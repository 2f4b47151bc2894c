"""fairseq's activation `swish` is a class, not a function: a layer's output would be a module."""

import torch.nn.functional as F  # noqa: N812
from fairseq import utils

from relpos_fairseq.mends.replacing import replaces


def make_swish_a_function() -> None:
    """Let `swish` be the function."""

    @replaces(utils, "get_activation_fn")
    def get_activation_fn(original, activation: str):
        return F.silu if activation == "swish" else original(activation)
