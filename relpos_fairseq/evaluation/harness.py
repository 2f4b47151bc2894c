r"""Register our language models in the lm-evaluation-harness (0.4), under the name `relpos`.

    relpos-lm-eval --model relpos --model_args checkpoint=checkpoints/checkpoint_best.pt --tasks wikitext

`relpos-lm-eval`, which is `python -m relpos_fairseq.evaluation.harness`, is `lm-eval` with all its flags, after the
model is registered: the harness looks for models nowhere else. Arguments of the model: checkpoint, data, mem_len,
context. From Python call `register()` first, and then lm_eval.simple_evaluate(model="relpos", ...).
"""

from __future__ import annotations

import sys

from relpos_fairseq.io.command import wait_passively
from relpos_fairseq.io.packages import remedy

NAME = "relpos"
MODEL = "relpos_fairseq.evaluation.harness_model:RelPosLM"


def register() -> None:
    """Register the model, which the harness imports when it is used.

    Raises:
        ImportError: the harness is not installed.
    """
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target=MODEL)


def main() -> None:
    """Run `lm-eval` with the model registered."""
    wait_passively()
    try:
        register()
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(f"relpos-lm-eval: error: this needs lm_eval ({error}): {remedy('lm_eval')}")
    cli_evaluate()


if __name__ == "__main__":
    main()
