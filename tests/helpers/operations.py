"""What torch's tracers see of the kernels."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Keeps what this package's operations are called with: (operation, arguments) in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "relpos":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def check_operations(run, names: list[str]) -> None:
    """Hold schemas, shapes and strides without numbers, and dispatch against what torch wants.

    Args:
        run: evaluates attention, forward and backward.
        names: of the operations that it calls, in their order.
    """
    with Watch() as watch:
        run()
    assert [str(each) for each, _ in watch.seen] == [f"relpos.{name}.default" for name in names]
    for each, given in watch.seen:
        torch.library.opcheck(each, _without_gradients(given), test_utils=CHECKS)


def _without_gradients(given: tuple) -> tuple:
    lists = (list, tuple)
    return tuple(
        [x.detach() if isinstance(x, torch.Tensor) else x for x in part] if isinstance(part, lists) else part
        for part in given
    )
