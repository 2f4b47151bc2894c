"""Patch what fairseq gets wrong in data, tasks and training, and what it prints; README.md says what each replaces.

A patch is given the original function first, and then its arguments.
"""

from __future__ import annotations

import argparse
import itertools
import linecache
import logging
import os
import re
import sys
import traceback
import types
import warnings
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import sacrebleu
import torch
import torch.nn.functional as F  # noqa: N812
from fairseq import utils
from fairseq.data.indexed_dataset import IndexedDataset
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.modules.layer_norm import Fp32LayerNorm
from fairseq.search import DiverseBeamSearch
from fairseq.tasks import masked_lm
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from torch import Tensor, nn
from torch.ao.quantization.observer import HistogramObserver

from relpos_fairseq.core.options import SCALAR_GAIN
from relpos_fairseq.core.scheme import PositionScheme, mark_schemes, takes_position_lr
from relpos_fairseq.io.command import describe_os_error
from relpos_fairseq.io.indexed import REMEDY, check_ids, read_indexed
from relpos_fairseq.io.manifests import check_unchanged
from relpos_fairseq.io.packages import describe_missing
from relpos_fairseq.io.reading import ordinary, reading
from relpos_fairseq.metrics.bleu import USUAL, bleu_of, tokenizer_of
from relpos_fairseq.nn.packed import BFloat16Linear
from relpos_fairseq.patches.sharding import check_optimizer, is_sharded, unsharded
from relpos_fairseq.text.assets import word_starts

logger = logging.getLogger(__name__)
LEAVES_NEUTRAL = 1e-4  # after 78 updates at 5e-5 the largest number of a table that began at 0 is 0.001
# Names of options that limit the length of a task's samples.
LENGTHS = ("max_source_positions", "max_target_positions", "tokens_per_sample", "max_positions")


def get_activation_fn(original, activation: str):
    """Return silu for the activation `swish`, for which fairseq returns a class instead of a function."""
    return F.silu if activation == "swish" else original(activation)


def restore_numpy_names() -> None:
    """Restore `np.compat.long`, which numpy 2 removed and language modelling by sentences and the hub read."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)  # type: ignore[attr-defined]


def best_fitting_int_dtype(original, largest: int) -> type[np.signedinteger]:
    """Return a type with a sign for places in a text: fairseq subtracts 1 from them, and 0 is one."""
    return np.int32 if largest < 2**31 else np.int64


def build_slice_indices(original, self, sizes, *how) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sizes of blocks that may exceed fairseq's 16 bits, and last lines that are not the empty ones before."""
    _, lines, slices = original(sizes, *how)
    last = np.searchsorted(np.cumsum(sizes), slices[:, 1] - 1, side="right")  # that of the block's last token
    lines[:, 2] = np.maximum(lines[:, 2], last)  # an empty block keeps its own
    return slices[:, 1] - slices[:, 0], lines, slices


def batch_by_size(original, indices, num_tokens_fn, num_tokens_vec=None, max_tokens=None, **kwargs):
    """Keep the last batch, which fairseq leaves out, in evaluation too, if its size is no multiple of 8.

    Name a sample that no batch holds.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []
    try:
        batches = original(indices, num_tokens_fn, num_tokens_vec, max_tokens, **kwargs)
    except AssertionError as error:
        if "should not exceed max_tokens" not in str(error):
            raise
        size, sample = max((int(num_tokens_fn(index)), int(index)) for index in indices)
        raise ValueError(
            f"sample #{sample} has {size:,} tokens, and a batch --max-tokens {max_tokens:,}: raise it"
        ) from None
    kept = sum(len(batch) for batch in batches)
    return batches if kept == len(indices) else [*batches, indices[kept:]]


def load_indexed_dataset(original, path, *args, **kwargs):
    """Compare the parts of a split with the manifest of their folder: half a file of zeros loads without a word."""
    for number in itertools.count():
        parts = [Path(f"{path}{number or ''}.{ending}") for ending in ("bin", "idx")]
        if not all(part.is_file() for part in parts):
            break
        for part in parts:
            check_unchanged(part)
    return original(path, *args, **kwargs)


def make_dataset(original, path, impl, fix_lua_indexing=False, dictionary=None):
    """Name a file of binarised text that is broken, or whose ids the dictionary has not."""
    if not all(Path(f"{path}.{ending}").is_file() for ending in ("bin", "idx")):
        return original(path, impl, fix_lua_indexing, dictionary)
    if impl == "mmap":
        ids = read_indexed(path).ids
        if dictionary is not None:
            check_ids(path, ids, len(dictionary))
    with reading(f"{path}.idx", "an index of binarised text", REMEDY):
        dataset = original(path, impl, fix_lua_indexing, dictionary)
        if dataset is None and impl == "huffman":
            raise ValueError("it is that of a Huffman code, which is not beside it")
        return dataset


def cached_item(original, self, i):
    """Read a sentence that has not been fetched ahead, as those of the first batch, which a trainer keeps."""
    return original(self, i) if i in self.cache_index else IndexedDataset.__getitem__(self, i)


def add_from_file(original, self, f):
    """Name a dictionary that is broken, where fairseq names a line of it or a word."""
    if not isinstance(f, str):
        original(self, f)
        return
    with reading(f, "a dictionary of fairseq", "copy it again, or give the folder of another"):
        special = len(self)
        original(self, str(ordinary(f)))
        wrong = next((one for one, n in zip(self.symbols, self.count, strict=True) if not 0 <= n < 2**63), None)
        if wrong is not None or len(self) == special:
            raise ValueError("it has no symbols" if wrong is None else f"the count of {wrong!r} is none")


def filter_indices_by_size(original, self, indices, dataset, max_positions=None, *args, **more):
    """Name the flags that raise the limit where samples are refused or left out for their length."""
    try:
        kept = original(self, indices, dataset, max_positions, *args, **more)
    except Exception as error:
        if "since max_positions=" not in str(error):
            raise
        raise ValueError(f"{error}; {_way_out(self, max_positions)}") from None
    dropped = len(indices) - len(kept)
    if dropped:
        logger.warning(
            "%d of %d samples left out, longer than %s: %s",
            dropped,
            len(indices),
            max_positions,
            _way_out(self, max_positions),
        )
    return kept


def options_of(task: Any) -> Any:
    """Return a task's options: its config, or the Namespace of a task of before hydra."""
    return getattr(task, "cfg", None) or task.args


def _way_out(task: FairseqTask, limit: object) -> str:
    """Return what raises a limit of length: the task's flags, a batch's, or those of a scheme's table."""
    known = [name for name in LENGTHS if getattr(options_of(task), name, None) is not None]
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in known or LENGTHS)
    sides = limit if isinstance(limit, tuple) else (limit,)
    tables = [f"{n.scheme} has a table of {n} positions" for n in sides if hasattr(n, "scheme")]
    if tables:
        return (
            f"position scheme {' and '.join(dict.fromkeys(tables))}: train with larger {flags}, or "
            f"choose a relative scheme, which takes any length"
        )
    if limit == task.max_positions():
        return f"raise {flags}"
    return f"--max-tokens raises this limit, else {flags}"


@cache
def _bleu_in_training(language: str) -> sacrebleu.BLEU:
    """Return the BLEU of a language whose text is not cut by 13a."""
    return bleu_of(language, None, "--eval-tokenized-bleu, which cuts by spaces")


def _own_bleu(task: FairseqTask) -> sacrebleu.BLEU | None:
    """Return the BLEU of a task's target language; None where fairseq's own is right, or the task names none."""
    cfg = options_of(task)
    asked = getattr(cfg, "eval_bleu", False) and not getattr(cfg, "eval_tokenized_bleu", False)
    language = getattr(cfg, "target_lang", None)  # back-translation has several, and no option for one
    if not asked or not language or tokenizer_of(language) == USUAL:
        return None
    return _bleu_in_training(language)


def begin_epoch(original, self, epoch, model):
    """Raise the error of a tokenizer that is not installed before the first update, not after an epoch."""
    _own_bleu(self)
    return original(self, epoch, model)


def inference_with_bleu(original, self, generator, sample, model):
    """Cut hypotheses and references by the target's language, as `relpos score` does: fairseq cuts all by 13a."""
    own, usual = _own_bleu(self), sacrebleu.corpus_bleu
    sacrebleu.corpus_bleu = usual if own is None else own.corpus_score  # fairseq looks it up in each call
    try:
        with unsharded(model):
            return original(self, generator, sample, model)
    finally:
        sacrebleu.corpus_bleu = usual


class _ConfigAsArgs:
    """A class attribute `args` that returns `task.cfg`; an instance's own `args` takes precedence."""

    def __get__(self, task: Any, owner: type | None = None) -> Any:
        return self if task is None else task.cfg


def restore_task_args() -> None:
    """Restore the attribute `args` of two of fairseq's tasks, which their own code reads."""
    for task in (masked_lm.MaskedLMTask, TranslationFromPretrainedBARTTask):
        if not hasattr(task, "args"):
            task.args = _ConfigAsArgs()


def get_whole_word_mask(original, args, dictionary):
    """Read from the data folder which symbols begin a word, where no --bpe of fairseq knows."""
    if getattr(args, "bpe", None):  # a task with a BPE of its own
        return original(args, dictionary)
    return word_starts(utils.split_paths(args.data)[0], dictionary)


def generate(original, self, sample, *args, **kwargs):
    """Let the groups of a diverse search be of the batch's rows: fairseq takes numbers of the data set for these."""
    if isinstance(self.search, DiverseBeamSearch):
        sample = {name: value for name, value in sample.items() if name != "id"}
    return original(self, sample, *args, **kwargs)


def build_generator(original, self, models, args, *given, prefix_allowed_tokens_fn=None, **kwargs):
    """Let the hub interface search with a task of several languages, whose function does not know the argument."""
    return original(self, models, args, *given, **kwargs)


def eval_lm_dataloader(original, self, *args, **kwargs):
    """Let fairseq-eval-lm read the batches of several languages' texts, which it gets as an iterator of epochs."""
    found = original(self, *args, **kwargs)
    return found.next_epoch_itr(shuffle=False) if hasattr(found, "next_epoch_itr") else found


def resample(original, dataset, size_ratio=1.0, **kwargs):
    """Draw a text that is not made smaller with replacement, as fairseq's other multilingual tasks do."""
    return original(dataset, size_ratio=size_ratio, **kwargs | {"replace": size_ratio >= 1})


def emulate_int8_histogram(original, w, scale=None, zero_point=None, bits=8):
    """Find the scale of --quant-noise-scalar on the CPU where the weight is there: fairseq copies it through a GPU."""
    if scale is None and w.device.type == "cpu":
        observer = HistogramObserver()
        observer(w.detach().float())
        scale, zero_point = (found.type_as(w) for found in observer.calculate_qparams())
    return original(w, scale, zero_point, bits)


def adaptive_loss(original, self, model, sample, reduce=True):
    """Score every token: fairseq takes the second word of each band after the first, which is its 1, for padding.

    Says what a model without an adaptive softmax lacks, where fairseq asserts it.
    """
    softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    if softmax is None:
        raise ValueError(
            "--criterion adaptive_loss needs a model with --adaptive-softmax-cutoff, which this one has not: give it, "
            "or --criterion cross_entropy"
        )
    if not reduce:
        return original(self, model, sample, reduce)
    output = model(**sample["net_input"])
    targets = model.get_targets(sample, output)
    tokens = int(targets.ne(self.padding_idx).sum())
    loss = output[0].new_zeros(1, dtype=torch.promote_types(output[0].dtype, torch.float32))
    for band, (scores, wanted) in enumerate(zip(*softmax(output[0], targets.view(-1)), strict=True)):
        if wanted is not None:
            ignored = {} if band else {"ignore_index": self.padding_idx}
            loss = loss + F.cross_entropy(scores.to(loss.dtype), wanted, reduction="sum", **ignored)
    size = len(targets) if self.sentence_avg else tokens
    counted = {"loss": loss.data, "ntokens": tokens, "nsentences": len(targets), "sample_size": size}
    return loss, size, counted


def build_adaptive_loss(original, cls, cfg, task):
    """Allow adaptive_loss with the default `--ddp-backend`, torch's DDP, if there is only one process.

    Several processes are still refused: a band without a token has no gradient there.
    """
    return original(cls, cfg, task) if torch.distributed.is_initialized() else cls(task, cfg.sentence_avg)


def keep_bf16_off_tpu() -> None:
    """Undo that `--bf16` makes fairseq look for a TPU, where it calls the function of one of our architectures."""

    def undo(args: argparse.Namespace) -> None:
        if getattr(args, "bf16", False):
            args.tpu = False

    ARCH_CONFIG_REGISTRY.update((name, undo) for name in ARCH_CONFIG_REGISTRY if name.startswith("relpos_"))


class Fp32Embedding(nn.Embedding):
    """An embedding whose gradient is summed in fp32, whatever its own type."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight.float(), self.padding_idx).to(self.weight.dtype)


def sum_in_fp32(model: nn.Module) -> None:
    """Let layer norms and embeddings of a model in bf16 sum their gradients over tokens in fp32, in place.

    On a CPU torch adds them in bf16, where a sum stands still at 256 times what is added: of 4,000 tokens half the
    gradient of a norm's bias and of a frequent symbol is lost.
    """
    for part in model.modules():
        if type(part) is nn.LayerNorm:
            part.__class__ = Fp32LayerNorm
        elif type(part) is nn.Embedding and part.max_norm is None and not part.scale_grad_by_freq:
            part.__class__ = Fp32Embedding


def build_optimizer(original, self):
    """Build the trainer's optimizer, which knows position schemes' parameters; warn of those that it leaves neutral.

    Where a CPU trains in fp32 and would in bf16 sooner, say so; in bf16, let our models sum gradients in fp32.

    Raises:
        ValueError: no --optimizer, or --fp16 on a CPU, where fairseq would miss CUDA.
    """
    if self.cfg.optimizer is None:
        raise ValueError("a training needs --optimizer: --optimizer adam, or --optimizer relpos_adam")
    common = self.cfg.common
    scaled = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
    if scaled and not self.cuda:
        raise ValueError("--fp16 needs a GPU: on a CPU leave it out, or give --bf16")
    ours = str(getattr(self.cfg.model, "_name", "")).startswith("relpos_")
    if ours and common.bf16 and not self.cuda:
        sum_in_fp32(self.model)
    if ours and not (self.cuda or common.tpu or common.fp16 or common.bf16) and self.is_data_parallel_master:
        if BFloat16Linear.problem() is None:
            logger.info(
                "this processor multiplies bf16: --bf16 would train about twice as fast, a tiny model no "
                "faster (what it costs: examples/comparison/README.md)"
            )
    names = _left_neutral(mark_schemes(self.model), self.cfg)
    if names and self.is_data_parallel_master:
        logger.warning(
            f"positions {', '.join(names)} are neutral, and at so small a learning rate they stay so: give --optimizer "
            f"relpos_adam --position-lr-scale 20, and tables of scalars {SCALAR_GAIN.flag} 50, too "
            f"(examples/roberta/README.convert.md)"
        )
    found = original(self)
    if any(map(is_sharded, self.model.parameters())):
        check_optimizer(self._optimizer, self.cfg.optimizer._name)
    return found


def _left_neutral(schemes: list[PositionScheme], cfg: Any) -> list[str]:
    """Return the names of schemes that change nothing, and that a fine-tuning's learning rate leaves so."""
    rate, scale = max(cfg.optimization.lr), getattr(cfg.optimizer, "position_lr_scale", 1)
    found = set()
    for scheme in schemes if rate <= LEAVES_NEUTRAL else ():
        # An update moves a logit by each channel of a vector, or by one scalar.
        moved = scheme.scalar_gain / scheme.shape.head_dim if SCALAR_GAIN in scheme.takes else 1
        if rate * scale * moved > LEAVES_NEUTRAL:
            continue
        learned: dict[str, Any] = {name: part.data for name, part in scheme.named_parameters() if part.requires_grad}
        own = {name: part.to_local() if is_sharded(part) else part for name, part in learned.items()}
        if own and scheme.is_neutral(own):
            found.add(scheme.name)
    return sorted(found)


def build_fp32_params(original, cls, args, params, flatten=True):
    """Return copies in fp32 that have the learning rate of what they are copies of; a flat one is of all together."""
    found = original(cls, args, params, flatten)
    if not flatten:
        for parameter, copied in zip(params, found, strict=True):
            copied.takes_position_lr = takes_position_lr(parameter)
    return found


PACKAGE = str(Path(__file__).resolve().parents[1])
ALL = "RELPOS_TRACEBACK"  # 1: every traceback is shown
PINNED = r"'pin_memory' argument is set as true but no accelerator"
TEXTS = (
    r"\s*'config' is validated against ConfigStore schema",
    r"In 'config': Usage of deprecated keyword in package header",
    PINNED,
    r"Support for mismatched key_padding_mask and attn_mask",
    r"The given NumPy array is not writable",
    r"`broadcast_buffers` is deprecated",
)


def speak_as_a_command() -> None:
    """Change what a whole process prints: that of a command of fairseq's or ours, not a program with the plugin."""
    if not {"fairseq_cli", f"{__name__.partition('.')[0]}.cli"}.isdisjoint(sys.modules):
        quiet_warnings()
        print_errors_in_one_line()


def quiet_warnings() -> None:
    """Silence warnings about fairseq's own use of hydra and torch, on which no user can act."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra(\..*)?$")
    for text in TEXTS:
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", message=r"`torch\.cuda\.amp\.", category=FutureWarning)


def print_errors_in_one_line() -> None:
    """Print errors that this package raises about its input without fifty lines of traceback."""
    original = sys.excepthook

    def hook(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, (BrokenPipeError, KeyboardInterrupt)) and not os.environ.get(ALL):
            end_quietly(error)
            return
        said = described(error)
        if said is None and issubclass(kind, ValueError) and is_about_input(trace):
            said = str(error)
        if said and not os.environ.get(ALL):
            print(f"{kind.__name__}: {said}", file=sys.stderr, flush=True)
        else:
            original(kind, error, trace)

    sys.excepthook = hook
    # hydra prints what it catches itself, unless it is told to let it through.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def end_quietly(error: BaseException) -> None:
    """Say in a word that a command was interrupted, and nothing where nobody reads its output any longer."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not flush at its end


def described(error: BaseException) -> str | None:
    """Describe an error that tells its cause by itself: a package or file that is missing, a flag that is named."""
    if isinstance(error, ModuleNotFoundError):
        return describe_missing(error)
    if isinstance(error, OSError):
        return describe_os_error(error) or (str(error) if "not found" in str(error) else None)
    return str(error) if isinstance(error, (AssertionError, ValueError)) and re.search(r"--[a-z]", str(error)) else None


def is_about_input(trace: TracebackType | None) -> bool:
    """Tell whether a statement `raise` of this package ended the program, rather than a bug."""
    frames = traceback.extract_tb(trace)
    if not frames or not frames[-1].filename.startswith(PACKAGE):
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line.lstrip().startswith("raise ")
