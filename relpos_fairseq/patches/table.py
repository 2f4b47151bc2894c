"""The table of patches: which functions of fairseq are replaced, and by what.

`README.md` says what goes wrong without each.  A patch acts where fairseq fails, loses data or is silent, and
changes no number that any other model computes, but a loss that leaves tokens out (`adaptive_loss`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import fairseq.distributed.utils as distributed
import fairseq.models.distributed_fairseq_model as wrapper
from fairseq import checkpoint_utils, options, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import Dictionary, TokenBlockDataset, data_utils, indexed_dataset, token_block_dataset
from fairseq.data.encoders.gpt2_bpe import GPT2BPE
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE
from fairseq.data.iterators import BufferedIterator
from fairseq.dataclass import initialize
from fairseq.file_io import PathManager
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.modules.quantization.scalar import ops as scalar
from fairseq.tasks import masked_lm, multilingual_language_modeling
from fairseq.tasks.fairseq_task import FairseqTask, LegacyFairseqTask
from fairseq.tasks.multilingual_language_modeling import MultilingualLanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask
from fairseq.trainer import Trainer

from relpos_fairseq.patches import (
    arguments,
    checkpoints,
    interactive,
    interruption,
    jobs,
    literal_options,
    processes,
    subwords,
    training,
)

# Changes that replace no single function.
SETTINGS: tuple[Callable[[], None], ...] = (
    training.restore_numpy_names,
    training.restore_task_args,
    training.allow_adaptive_loss_on_one_process,
    checkpoints.allow_checkpoint_types,
    literal_options.guard_modules,
)
# Changes of what a whole process prints: of fairseq's commands and ours, not of a program that imports the plugin.
OF_COMMANDS = (training.quiet_warnings, training.print_errors_in_one_line)
# (object, name, patch): the function `name` of the object is replaced by the patch.
PATCHES: tuple[tuple[Any, str, Callable], ...] = (
    (utils, "get_activation_fn", training.get_activation_fn),
    (utils, "import_user_module", literal_options.import_user_module),
    (initialize, "add_defaults", jobs.begin),
    (options, "parse_args_and_arch", arguments.parse_args_and_arch),
    (data_utils, "batch_by_size", training.batch_by_size),
    (data_utils, "load_indexed_dataset", training.load_indexed_dataset),
    (indexed_dataset, "make_dataset", training.make_dataset),
    (indexed_dataset.IndexedCachedDataset, "__getitem__", training.cached_item),
    (token_block_dataset, "best_fitting_int_dtype", training.best_fitting_int_dtype),
    (TokenBlockDataset, "_build_slice_indices", training.build_slice_indices),
    (Dictionary, "add_from_file", training.add_from_file),
    (masked_lm, "get_whole_word_mask", training.get_whole_word_mask),
    (SubwordNMTBPE, "__init__", subwords.subword_nmt),
    (SentencepieceBPE, "__init__", subwords.sentencepiece),
    (GPT2BPE, "__init__", subwords.gpt2),
    (FairseqTask, "build_criterion", checkpoints.build_criterion),
    (LegacyFairseqTask, "build_criterion", checkpoints.build_criterion),
    (FairseqTask, "filter_indices_by_size", training.filter_indices_by_size),
    (TranslationTask, "begin_epoch", training.begin_epoch),
    (TranslationTask, "_inference_with_bleu", training.inference_with_bleu),
    (Trainer, "_build_optimizer", training.build_optimizer),
    (Trainer, "save_checkpoint", checkpoints.save_patience),
    (checkpoint_utils, "overwrite_args_by_name", checkpoints.overwrite_args_by_name),
    (checkpoint_utils, "load_checkpoint", checkpoints.restore),
    (TransformerDecoderBase, "upgrade_state_dict_named", checkpoints.upgrade_state_dict_named),
    (AdaptiveLoss, "forward", training.adaptive_loss),
    (multilingual_language_modeling, "ResamplingDataset", training.resample),
    (scalar, "emulate_int8_histogram", training.emulate_int8_histogram),
    (TranslationMultiSimpleEpochTask, "build_generator", training.build_generator),
    (MultilingualLanguageModelingTask, "eval_lm_dataloader", training.eval_lm_dataloader),
    (PathManager, "copy", checkpoints.copy),
    (wrapper, "DistributedDataParallel", processes.wrap),
    (Trainer, "train_step", processes.train_step),
    (BufferedIterator, "_create_consumer", processes.create_consumer),
    (distributed, "call_main", processes.call_main),
    (distributed, "distributed_main", processes.distributed_main),
    (distributed, "all_gather_list", processes.all_gather_list),
)
# The same of a command that is running already.
PATCHES_OF_RUNNING: tuple[tuple[str, str, Callable], ...] = (
    ("fairseq_cli.train", "add_defaults", processes.add_defaults),
    ("fairseq_cli.train", "add_defaults", jobs.begin),
    ("fairseq_cli.train", "train", interruption.train),
    ("fairseq_cli.train", "validate_and_save", interruption.validate_and_save),
    ("fairseq_cli.interactive", "buffered_read", interactive.buffered_read),
    ("fairseq_cli.interactive", "make_batches", interactive.make_batches),
)


def apply_patches() -> None:
    """Apply all patches, once a process."""
    is_command = not {"fairseq_cli", f"{__name__.partition('.')[0]}.cli"}.isdisjoint(sys.modules)
    for change in (*SETTINGS, *(OF_COMMANDS if is_command else ())):
        change()
    loaded = [(processes.running(owner), name, patch) for owner, name, patch in PATCHES_OF_RUNNING]
    running = [row for row in loaded if hasattr(*row[:2])]  # a module may be loading: fairseq, and the plugin with it
    for owner, name, patch in (*PATCHES, *running):
        replaces(owner, name)(patch)


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Replace `owner.name` by the decorated function, whose first argument is the original."""
    original = getattr(owner, name)

    def put(function: Callable) -> Callable:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return replacement

    return put
