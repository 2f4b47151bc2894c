"""Language modelling by sentences and hub generation read np.compat.long, which numpy 2 removed."""

import types

import numpy as np


def restore_numpy_names() -> None:
    """Give numpy the name back."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)
