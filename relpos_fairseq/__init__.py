"""relpos_fairseq: every published position scheme for fairseq's transformers.

Importing this package, or naming it as --user-dir, registers its models with fairseq.  Without
fairseq, positions, schemes and attention import and work on their own.
"""

from importlib.util import find_spec

from relpos_fairseq.version import __version__

__all__ = ["__version__"]


def _register_with_fairseq() -> None:
    from fairseq.models import ARCH_CONFIG_REGISTRY

    from relpos_fairseq import compat, compat_inputs, fused_adam
    from relpos_fairseq.conversion import on_load
    from relpos_fairseq.criterions import label_smoothing
    from relpos_fairseq.criterions import question_answering as _criterion  # noqa: F401
    from relpos_fairseq.criterions import sentence_prediction_glue as _glue  # noqa: F401
    from relpos_fairseq.data.tokenizers import fairseq_bpe  # noqa: F401
    from relpos_fairseq.models import (
        relpos_roberta,
        relpos_transformer,
        relpos_transformer_lm,
        relpos_transformer_xl,
    )
    from relpos_fairseq.tasks import question_answering, segment_language_modeling  # noqa: F401

    compat.apply()
    compat_inputs.apply()
    label_smoothing.install()
    fused_adam.install()
    on_load.install()
    models = (relpos_transformer, relpos_transformer_lm, relpos_transformer_xl, relpos_roberta)
    for name in (name for model in models for name in model.SIZES):
        ARCH_CONFIG_REGISTRY[name] = compat.keep_bf16_off_tpu


if find_spec("fairseq") is not None:
    _register_with_fairseq()
