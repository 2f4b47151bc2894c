"""What happens when the plugin registers with fairseq, in reading order.

`relpos_fairseq/__init__.py` calls `register` once fairseq has been imported.  Where files of a
folder need fairseq, the folder's `__init__.py` imports it, so that the plugin has registered before
the first of these files begins.
"""

from __future__ import annotations

import functools


@functools.cache  # once a process, though this package may be imported again
def register() -> None:
    """Patch fairseq, register our names, and connect our models to fairseq's own parts."""
    patch_fairseq()
    register_ours()
    connect_ours()


def patch_fairseq() -> None:
    """Patch fairseq's faults (patches/README.md); no number of another model changes."""
    from relpos_fairseq.patches.table import apply_patches

    apply_patches()


def register_ours() -> None:
    """Import every file that registers a name with fairseq."""
    import relpos_fairseq.criterions.cross_entropy
    import relpos_fairseq.criterions.question_answering
    import relpos_fairseq.criterions.sentence_prediction_glue
    import relpos_fairseq.inference.checkpoints.hooks
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

    from relpos_fairseq.inference.checkpoints import hooks, load_hooks
    from relpos_fairseq.models.pruning import prune_before_building
    from relpos_fairseq.patches.training import keep_bf16_off_tpu
    from relpos_fairseq.tasks import sentence_pairs

    sentence_pairs.supply_segments()
    prune_before_building()
    load_hooks.replace_loaders()
    hooks.save_assets_with_checkpoints()
    hooks.install_text_hub()
    hooks.tell_length_of_generation()
    for name in ARCH_CONFIG_REGISTRY:
        if name.startswith("relpos_"):
            ARCH_CONFIG_REGISTRY[name] = keep_bf16_off_tpu
