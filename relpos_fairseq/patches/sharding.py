"""Patch `--ddp-backend fully_sharded`: torch's FSDP2 in place of fairscale's FSDP; README.md says what each replaces.

Each process holds some rows of every parameter, gradient and moment, as DTensors.  A checkpoint holds them whole, as an
ordinary one does, and of what is read from a checkpoint each process keeps its rows.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel
from fairseq.trainer import Trainer
from torch import Tensor, nn

from relpos_fairseq.io.errors import UserError

BACKEND = "fully_sharded"
SAME_PARTS = "every process must use the same parameters"
# What does not work under it: an option's place in the config, its values that do not (None: any that is set), why.
REFUSED = (
    ("ema.store_ema", None, "average checkpoints (relpos average)"),
    ("optimization.use_bmuf", None, "leave it out"),
    ("common.amp", None, "give --bf16"),
    ("common.quantization_config_path", None, "quantise on one process"),
    ("common.model_parallel_size", range(2, sys.maxsize), "give 1"),
    ("distributed_training.heartbeat_timeout", range(1, sys.maxsize), "leave it out"),
    ("distributed_training.use_sharded_state", None, "leave it out: the checkpoint is whole"),
    ("distributed_training.cpu_offload", None, "leave it out"),
    ("distributed_training.pipeline_model_parallel", None, "leave it out"),
    ("distributed_training.zero_sharding", ("os",), "leave it out: the optimizer's state is sharded already"),
    ("model.encoder_layerdrop", None, f"give 0: {SAME_PARTS}"),
    ("model.decoder_layerdrop", None, f"give 0: {SAME_PARTS}"),
    ("model.adaptive_input", None, f"leave it out: {SAME_PARTS}"),
    ("model.base_layers", None, f"give 0: {SAME_PARTS}"),
    ("model.quant_noise_pq", None, "give 0: its noise overwrites parameters"),
    ("model.mha_reg_scale_factor", None, "give 0: its loss is of whole parameters"),
    ("model.ffn_reg_scale_factor", None, "give 0: its loss is of whole parameters"),
    ("criterion._name", ("adaptive_loss",), f"give cross_entropy: {SAME_PARTS}"),
    ("task._name", ("online_backtranslation",), "it searches in training: give another --ddp-backend"),
)


def refuse_unshardable(cfg: Any) -> None:
    """Raise a UserError for an option that does not work under `--ddp-backend fully_sharded` on several processes."""
    given = cfg.distributed_training
    if given.ddp_backend != BACKEND or given.distributed_world_size == 1:
        return
    refused = list(REFUSED)
    if not (cfg.common.memory_efficient_fp16 or cfg.common.fp16_no_flatten_grads or cfg.common.bf16):
        refused.append(("common.fp16", None, "give --fp16-no-flatten-grads too, or --bf16"))
    for place, values, remedy in refused:
        part, _, name = place.partition(".")
        value = getattr(cfg.get(part), name, None)
        if value in values if values else value:
            flag = f"--{(part if name == '_name' else name).replace('_', '-')}"
            typed = flag if value is True else f"{flag} {value}"
            raise UserError(
                f"{typed} (hydra: {place.removesuffix('._name')}={value}) does not work with --ddp-backend {BACKEND} "
                f"on several processes: {remedy}"
            )


def keep_fairscale_out() -> None:
    """Let the trainer take a sharded model for any other: what it does about fairscale's is done here."""
    Trainer.is_fsdp = property(lambda trainer: False)


def enable_wrap(original, cfg):
    """Build the model whole; `shard` shards it when the trainer asks for it."""
    return contextlib.nullcontext()


def is_sharded(tensor: Any) -> bool:
    """Return True for a tensor of which this process holds some rows."""
    return hasattr(tensor, "device_mesh")


def shard(original, args, model, process_group, device):
    """Shard a model's parameters: those of each layer that is large enough together, all others together."""
    if args.ddp_backend != BACKEND:
        return original(args, model, process_group, device)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not isinstance(model, BaseFairseqModel):
        raise UserError(f"--criterion with parameters ({type(model).__name__}) is not sharded: give another")
    how = {"mesh": DeviceMesh.from_group(process_group, device.type)}
    if args.fp32_reduce_scatter:
        how["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    names = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    for layer in [part for part in model.modules() if getattr(part, "shards_apart", False)]:
        if any(names[id(parameter)] > 1 for parameter in layer.parameters()):
            continue  # one that layers share is sharded once
        layer.reshards = not args.no_reshard_after_forward
        fully_shard(layer, reshard_after_forward=layer.reshards, **how)
    fully_shard(model, **how)
    for part in model.modules():
        part.register_load_state_dict_pre_hook(_cut_parameters)
    return model


def _cut(whole: Tensor, like: Any) -> Tensor:
    """Return a whole tensor, sharded as another is."""
    cut: Any = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    rows, mesh = cut.to_local(), like.device_mesh
    first = mesh.get_local_rank() * -(-len(whole) // mesh.size())
    rows.copy_(whole[first : first + len(rows)])
    return cut


def _cut_parameters(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    for name, own in module._parameters.items():
        given = state.get(f"{prefix}{name}")
        if is_sharded(own) and given is not None and not is_sharded(given) and given.shape == own.shape:
            state[f"{prefix}{name}"] = _cut(given, own)


def cut_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Keep this process's rows of the tensors in an optimizer's state; a hook of torch's optimizers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):  # torch compares their counts
        own = state["state"].get(number, {})
        for name, value in own.items():
            if is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
                own[name] = _cut(value, parameter)


def check_optimizer(optimizer: Any, name: str) -> None:
    """Let a sharded training's optimizer read whole states; refuse one that computes with whole tensors."""
    if not optimizer.supports_flat_params:
        raise UserError(
            f"--optimizer {name} does not work with --ddp-backend {BACKEND} on several processes: "
            "give adam or relpos_adam"
        )
    for inner in parts_of(optimizer):
        inner.register_load_state_dict_pre_hook(cut_moments)


def parts_of(optimizer: Any) -> list[Any]:
    """Return torch's optimizers in one of fairseq's: several in its composite one."""
    inner = getattr(optimizer, "optimizer", None)
    return [part.optimizer for part in inner.optimizers.values()] if hasattr(inner, "optimizers") else [inner]


def consolidate_optimizer(original, self):
    """Make the model and its optimizer's state whole for the first process, which saves them; all must call this.

    An error of one process's update is raised at once: others do not come here, and no crash.pt can be written.
    """
    if not hasattr(self._model, "unshard"):  # parameters of a model that was evaluated may be whole
        original(self)
        return
    error = sys.exc_info()[1]
    if isinstance(error, Exception) and not isinstance(error, FloatingPointError):
        raise error
    saves = self.is_data_parallel_master
    self._gathered_model = _whole(self._model.state_dict(keep_vars=True), saves)
    if not self.cfg.checkpoint.no_save_optimizer_state:
        state = _whole(self.optimizer.state_dict(), saves)
        self._gathered_optim_state = state if saves else None  # fairseq saves it


def with_whole_model(trainer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the model that `consolidate_optimizer` made whole, if it did."""
    model = vars(trainer).pop("_gathered_model", None)
    return state if model is None else state | {"model": model}


def _whole(tree: Any, keeps: bool) -> Any:
    """Return a nest of tensors, whole and on the CPU; on a process that does not keep them, empty ones."""
    found: dict[int, Tensor] = {}  # one tensor may have several names

    def whole(tensor: Any) -> Tensor:
        if id(tensor) not in found:
            full = tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()
            found[id(tensor)] = full.cpu() if keeps else full.new_empty(0)
        return found[id(tensor)]

    return utils.apply_to_sample(whole, tree)


def clip_grad_norm_(original, params, max_norm, aggregate_norm_fn=None):
    """Clip the rows of gradients that this process holds by the norm of all rows."""
    params = [params] if isinstance(params, Tensor) else list(params)
    shards = [parameter.grad for parameter in params if is_sharded(parameter.grad)]
    if not shards:
        return original(params, max_norm, aggregate_norm_fn)

    def over_processes(norm: Tensor) -> Tensor:
        square = norm.float().square()
        torch.distributed.all_reduce(square, group=shards[0].device_mesh.get_group())
        return square.sqrt()

    return original([SimpleNamespace(grad=grad.to_local()) for grad in shards], max_norm, over_processes)


@contextlib.contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """Hold a model's parameters whole in a `with` block, in which processes call different parts of it."""
    parts = [part for part in model.modules() if hasattr(part, "unshard")]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts[1:]:
            part.set_reshard_after_forward(part.reshards, recurse=False)
        for part in parts:
            part.reshard()
