"""torch.load(weights_only=True), torch's default, refuses types that fairseq's checkpoints hold."""

import argparse
import collections
import typing

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

try:
    from numpy._core.multiarray import _reconstruct, scalar
except ImportError:  # numpy 1
    from numpy.core.multiarray import _reconstruct, scalar

PLAIN = (argparse.Namespace, int, dict, list, collections.defaultdict, _TensorPlaceholder)
CONFIG = (DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode, typing.Any)
NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
NUMPY = (np.ndarray, np.dtype, *(type(np.dtype(code)) for code in NUMBERS))
MAKERS = (_reconstruct, scalar)  # numpy 1 and 2 save them under different paths


def allow_checkpoint_types() -> None:
    """Name these types as safe, so that loading stays safe."""
    paths = ("numpy._core.multiarray", "numpy.core.multiarray")
    named = [(maker, f"{path}.{maker.__name__}") for maker in MAKERS for path in paths]
    torch.serialization.add_safe_globals([*PLAIN, *CONFIG, *NUMPY, *MAKERS, *named])
