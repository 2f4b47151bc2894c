"""`--optimizer relpos_adam`: fairseq's Adam in one pass, by torch.optim.AdamW(fused=True)'s kernel.

fairseq's own step makes eight passes over parameters, gradients and moments, with a call for each
tensor.  Both compute the same but for eps, which fairseq adds before it corrects the bias of the second
moment and torch after the correction:

    fairseq  p -= lr sqrt(c) / b * m / (sqrt(v) + eps)          b = 1 - beta1^t, c = 1 - beta2^t
    torch    p -= lr / b * m / (sqrt(v) / sqrt(c) + eps')       equal for eps' = eps / sqrt(c)

The state keeps fairseq's layout (`step` is an int), so that each of the two optimizers resumes the other's
checkpoints.  fairseq's own step remains for half precision, amsgrad, and tensors that are not contiguous,
whose elements the kernel would pair wrongly.

Tables that a pre-trained model is given start at 0, where the small learning rate of fine-tuning leaves them: after 78
updates of at most 5e-5 the largest is 0.001.  `--position-lr-scale` gives them a larger one.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from fairseq.optim import register_optimizer
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig
from torch import Tensor, nn

from relpos_fairseq.core.scheme import takes_position_lr
from relpos_fairseq.io.errors import UserError

EXACT = (torch.float32, torch.float64)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class RelPosAdamConfig(FairseqAdamConfig):
    """Options of fairseq's Adam, and of the learning rate of position schemes."""

    position_lr_scale: float = field(
        default=1.0,
        metadata={
            "help": "how many times --lr is the learning rate of position schemes' parameters, absolute positions "
            "aside: 20 for tables that a pre-trained model was given"
        },
    )


@register_optimizer("relpos_adam", dataclass=RelPosAdamConfig)
class RelPosAdam(FairseqAdam):
    """fairseq's Adam with its options, whose step is one pass over memory."""

    _optimizer: torch.optim.Optimizer

    def __init__(self, cfg: Any, params: Any) -> None:
        self._scales = [1.0]  # of the learning rate, by group
        scale = getattr(cfg, "position_lr_scale", 1.0)  # fairseq's own config has none
        if scale != 1:
            params = _apart(params, scale)
            self._scales.append(scale)
        super().__init__(cfg, params)
        if type(self._optimizer) is Adam:  # not apex's, which fairseq prefers on a GPU
            self._optimizer = OnePassAdam(params, **self.optimizer_config)

    def set_lr(self, lr: float) -> None:
        for group, scale in zip(self.param_groups, self._scales, strict=True):
            group["lr"] = lr * scale

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> None:
        """Read a state; groups keep this training's scales, also where no schedule sets the rate again.

        Raises:
            UserError: the state is of a training with the scale, and this one has none, or the other way round.
        """
        saved, scaled = (len(one) > 1 for one in (state_dict["param_groups"], self._scales))
        if saved != scaled:
            raise UserError(
                f"it was trained {'with' if saved else 'without'} --position-lr-scale, and this training is "
                f"{'with' if scaled else 'without'}: do as it did, or give --reset-optimizer"
            )
        super().load_state_dict(state_dict, optimizer_overrides)
        self.set_lr(self.get_lr())


# fairseq compares the class with the checkpoint's: each reads what the other has written.
RelPosAdam.__name__ = FairseqAdam.__name__


def _apart(params: Any, scale: float) -> list[dict]:
    """Return groups of parameters: others, and those of position schemes.

    Raises:
        ValueError: none is known as one, or the scale is no factor.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"--position-lr-scale {scale:g}: give a finite number above 0")
    apart = [*filter(takes_position_lr, params)]
    if not apart:
        raise ValueError(
            f"--position-lr-scale {scale:g}: the optimizer is given no parameters of relative schemes: leave it out, "
            f"or with --fp16, whose parameters are one flat copy, give --fp16-no-flatten-grads too"
        )
    own = set(map(id, apart))
    return [{"params": [part for part in params if id(part) not in own]}, {"params": apart}]


class OnePassAdam(Adam):
    """fairseq's Adam; takes fairseq's own step where torch's kernel would not compute the same."""

    def step(self, closure: Callable | None = None) -> Any:
        if not all(_fusible(self.state, group) for group in self.param_groups):
            return super().step(closure)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for (_, _, number), parameters in _alike(self.state, group).items():
                _fused_step(self.state, group, parameters, number)
        return loss


def _fusible(state: dict, group: dict) -> bool:
    """Tell whether torch's kernel computes what fairseq's step would of these parameters."""
    if group.get("amsgrad", False) or isinstance(group["lr"], Tensor):
        return False
    return all(_plain(part, state.get(part, {})) for part in group["params"])


def _plain(part: nn.Parameter, own: dict) -> bool:
    if part.grad is None:
        return True
    if part.dtype not in EXACT or part.device.type not in ("cpu", "cuda"):
        return False
    together = [part, part.grad, *(own[name] for name in MOMENTS if name in own)]
    return part.grad.dtype == part.dtype and all(
        each.layout == torch.strided and each.is_contiguous() for each in together
    )


def _alike(state: dict, group: dict) -> dict[tuple, list[nn.Parameter]]:
    """Group parameters with gradients by device, type and number of steps, this one included.

    Moments begin at 0, and take the parameter's type and device, as in fairseq's step.
    """
    found = defaultdict(list)
    for part in group["params"]:
        if part.grad is None:
            continue
        own = state[part]
        if len(own) == 0:
            own["step"] = 0
            own.update({name: torch.zeros_like(part.data) for name in MOMENTS})
        for name in MOMENTS:
            own[name] = own[name].to(part.data)
        own["step"] += 1
        found[part.device, part.dtype, own["step"]].append(part)
    return found


def _rows(tensor: Any) -> Tensor:
    """Return what this process holds of a tensor that processes share."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _fused_step(state: dict, group: dict, parameters: list[nn.Parameter], number: int) -> None:
    beta1, beta2 = group["betas"]
    steps = torch.full((len(parameters),), float(number), device=parameters[0].device)
    torch._fused_adamw_(
        [_rows(part.data) for part in parameters],
        [_rows(cast(Tensor, part.grad).data) for part in parameters],  # `_alike` leaves out those without
        [_rows(state[part]["exp_avg"]) for part in parameters],
        [_rows(state[part]["exp_avg_sq"]) for part in parameters],
        [],
        list(steps.unbind()),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"] / math.sqrt(1 - beta2**number),
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
