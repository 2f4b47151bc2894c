"""Our language models in the lm-evaluation-harness, under the name `relpos`.

    relpos-lm-eval --model relpos --model_args checkpoint=checkpoints/checkpoint_best.pt \
        --tasks wikitext

`relpos-lm-eval` is `lm-eval` with all its flags, once the model is registered: the harness (0.4)
looks for models nowhere else.  Arguments of the model: checkpoint, data, mem_len, context.  From
Python call `register()` first, and then lm_eval.simple_evaluate(model="relpos", ...).
"""

from __future__ import annotations

import sys

# ---- Our language models in the lm-evaluation-harness, under the name `relpos`.
#     relpos-lm-eval --model relpos --model_args checkpoint=checkpoints/checkpoint_best.pt \
#         --tasks wikitext
#
# `relpos-lm-eval` is `lm-eval` with all its flags, once the model is registered: the harness (0.4)
# looks for models nowhere else.  Arguments of the model: checkpoint, data, mem_len, context.  From
# Python call `register()` first, and then lm_eval.simple_evaluate(model="relpos", ...).


NAME = "relpos"
EXTRA = "pip install 'relpos_fairseq[lm-eval]'"


def register() -> None:
    """Let the harness know the model; it is imported where it is used.

    Raises:
        ImportError: the harness is not installed.
    """
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target=f"{__name__}.model:RelPosLM")


def main() -> None:
    try:
        register()
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(f"relpos-lm-eval: error: this needs lm_eval ({error}): {EXTRA}")
    cli_evaluate()


# ---- `python -m relpos_fairseq.evaluation.harness` is `relpos-lm-eval`.


if __name__ == "__main__":
    main()
