"""--model-overrides leaves out an option that came after the checkpoint, and says nothing."""

import logging

from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import DictConfig, open_dict

from relpos_fairseq.mends.replacing import replaces

logger = logging.getLogger(__name__)


def override_later_options() -> None:
    """Set it, in a model of ours, and say so."""

    @replaces(checkpoint_utils, "overwrite_args_by_name")
    def overwrite_args_by_name(original, cfg, overrides):
        original(cfg, overrides)
        model = cfg.get("model")
        name = model.get("_name") if isinstance(model, DictConfig) else None
        if not (name or "").startswith("relpos_"):
            return
        known = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY.get(name, name)]
        parts = [part for part in cfg.values() if isinstance(part, DictConfig)]
        with open_dict(model):
            for field, value in overrides.items():
                if field in known.__dataclass_fields__ and not any(field in p for p in parts):
                    logger.warning("the checkpoint is older than %s: set to %r", field, value)
                    model[field] = value
