"""What the flat configs of models with a single stack of layers share."""

from dataclasses import field, fields, make_dataclass
from typing import Any

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from relpos_fairseq.config import PositionConfig

ACTIVATIONS = ChoiceEnum([*utils.get_available_activation_fns(), "swish"])  # of Marian's models
# An encoder or a decoder alone: --position-scheme says all.
_DROPPED = ("encoder_position_scheme", "decoder_position_scheme")


def help_text(default: Any, text: str) -> Any:
    """A field with a default and a help text."""
    return field(default=default, metadata={"help": text})


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
