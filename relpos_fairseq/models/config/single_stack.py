"""What the flat configs of models with a single stack of layers share."""

from dataclasses import field, fields, make_dataclass
from typing import Any

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import OmegaConf

from relpos_fairseq.config import PositionConfig

ACTIVATIONS = ChoiceEnum([*utils.get_available_activation_fns(), "swish"])  # of Marian's models
# An encoder or a decoder alone: --position-scheme says all.
_DROPPED = ("encoder_position_scheme", "decoder_position_scheme")


def plain(cfg: Any) -> dict[str, Any]:
    """Return the values of a DictConfig, a Namespace or a dataclass."""
    if OmegaConf.is_config(cfg):
        return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    return dict(vars(cfg))


SinglePlacement = make_dataclass(
    "SinglePlacement",
    [
        (part.name, str, field(default=part.default, metadata=part.metadata))
        for part in fields(PositionConfig)
        if part.name not in _DROPPED
    ],
    bases=(FairseqDataclass,),
)
SinglePlacement.__module__ = __name__
