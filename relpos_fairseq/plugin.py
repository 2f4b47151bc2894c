"""What happens when the plugin registers with fairseq, in reading order.

`relpos_fairseq/__init__.py` calls `register` once fairseq has been imported.  Where files of a
folder need fairseq, the folder's `__init__.py` imports it, so that the plugin has registered before
the first of these files begins.
"""

from __future__ import annotations

import functools


@functools.cache  # once a process, though this package may be imported again
def register() -> None:
    """Mend fairseq, register what is ours, and connect our models to fairseq's own parts."""
    mend_fairseq()
    register_ours()
    connect_ours()


def mend_fairseq() -> None:
    """Mend what is wrong in fairseq (mends/README.md); no number of another model changes."""
    from relpos_fairseq.mends import (
        adaptive_alone,
        broken_checkpoints,
        checkpoint_types,
        cpu_ddp,
        cpu_precision,
        filtered_lengths,
        foreign_flags,
        hidden_mismatch,
        last_batch,
        later_options,
        literal_options,
        noisy_warnings,
        numpy_names,
        one_line_errors,
        swish,
        task_state,
        whole_copies,
        whole_words,
    )

    noisy_warnings.quiet_warnings()
    numpy_names.restore_numpy_names()
    swish.make_swish_a_function()
    checkpoint_types.allow_checkpoint_types()
    literal_options.read_options_as_literals()
    last_batch.keep_last_batch()
    filtered_lengths.explain_filtered_lengths()
    broken_checkpoints.explain_broken_checkpoints()
    later_options.override_later_options()
    hidden_mismatch.name_position_mismatch()
    cpu_ddp.run_ddp_on_cpu()
    adaptive_alone.let_one_process_use_adaptive_loss()
    cpu_precision.refuse_fp16_without_gpu()
    foreign_flags.refuse_foreign_flags()
    one_line_errors.print_errors_in_one_line()
    task_state.gather_task_state()
    whole_words.mask_whole_words()
    whole_copies.copy_checkpoints_whole()


def register_ours() -> None:
    """Import every file that registers a name with fairseq."""
    import relpos_fairseq.criterions.cross_entropy
    import relpos_fairseq.criterions.question_answering
    import relpos_fairseq.criterions.sentence_prediction_glue
    import relpos_fairseq.inference.checkpoints.fairseq_bpe
    import relpos_fairseq.models.relpos_roberta
    import relpos_fairseq.models.relpos_transformer
    import relpos_fairseq.models.relpos_transformer_lm
    import relpos_fairseq.models.relpos_transformer_xl
    import relpos_fairseq.optim.adam
    import relpos_fairseq.tasks.question_answering
    import relpos_fairseq.tasks.segment_language_modeling  # noqa: F401


def connect_ours() -> None:
    """Let fairseq's tasks and trainer serve our models; nothing changes for any other."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    from relpos_fairseq.conversion import on_load
    from relpos_fairseq.inference.checkpoints import hub, same_text, saving
    from relpos_fairseq.mends.cpu_precision import keep_bf16_off_tpu
    from relpos_fairseq.tasks import sentence_pairs

    sentence_pairs.supply_segments()
    on_load.convert_on_load()
    same_text.compare_text_on_load()
    saving.keep_text_beside_checkpoints()
    hub.speak_text()
    for name in ARCH_CONFIG_REGISTRY:
        if name.startswith("relpos_"):
            ARCH_CONFIG_REGISTRY[name] = keep_bf16_off_tpu
