"""What happens when the plugin registers with fairseq, in reading order.

`relpos_fairseq/__init__.py` calls `register` once fairseq has been imported.  A package of ours
whose files need fairseq imports it in its `__init__.py`, so that the plugin registers before the
first of these files begins.
"""

from __future__ import annotations

import functools

from fairseq.models import ARCH_CONFIG_REGISTRY

from relpos_fairseq.mends import (
    broken_checkpoints,
    checkpoint_types,
    cpu_ddp,
    cpu_precision,
    filtered_lengths,
    hidden_mismatch,
    last_batch,
    noisy_warnings,
    numpy_names,
    task_state,
    whole_words,
)

MENDS = (
    noisy_warnings.quiet_warnings,
    numpy_names.restore_numpy_names,
    checkpoint_types.allow_checkpoint_types,
    last_batch.keep_last_batch,
    filtered_lengths.explain_filtered_lengths,
    broken_checkpoints.explain_broken_checkpoints,
    hidden_mismatch.name_position_mismatch,
    cpu_ddp.run_ddp_on_cpu,
    task_state.gather_task_state,
    whole_words.mask_whole_words,
)


@functools.cache  # once a process, though this package may be imported again
def register() -> None:
    """Mend fairseq, register all that is ours, and connect our models to fairseq's own parts."""
    for mend in MENDS:
        mend()
    register_ours()
    connect_ours()


def register_ours() -> None:
    """Import every file that registers a name with fairseq."""
    import relpos_fairseq.criterions.cross_entropy
    import relpos_fairseq.criterions.question_answering
    import relpos_fairseq.criterions.sentence_prediction_glue
    import relpos_fairseq.data.tokenizers.fairseq_bpe
    import relpos_fairseq.models.relpos_roberta
    import relpos_fairseq.models.relpos_transformer
    import relpos_fairseq.models.relpos_transformer_lm
    import relpos_fairseq.models.relpos_transformer_xl
    import relpos_fairseq.optim.adam
    import relpos_fairseq.tasks.question_answering
    import relpos_fairseq.tasks.segment_language_modeling  # noqa: F401


def connect_ours() -> None:
    """Let fairseq's tasks and trainer serve our models; they do nothing for any other."""
    from relpos_fairseq.conversion import on_load
    from relpos_fairseq.tasks import sentence_pairs

    sentence_pairs.supply_segments()
    on_load.convert_on_load()
    for name in ARCH_CONFIG_REGISTRY:
        if name.startswith("relpos_"):
            ARCH_CONFIG_REGISTRY[name] = cpu_precision.keep_bf16_off_tpu
