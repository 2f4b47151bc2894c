"""`--encoder-learned-pos` of fairseq's transformer ends in a screen of usage."""

import sys
from collections.abc import Sequence

from fairseq import options

from relpos_fairseq.mends.replacing import replaces
from relpos_fairseq.schemes import named_elsewhere


def refuse_foreign_flags() -> None:
    """Say which flag of ours stands for it, where a model of ours is asked for."""

    @replaces(options, "parse_args_and_arch")
    def parse_args_and_arch(original, parser, input_args=None, *args, **kwargs):
        refuse(sys.argv[1:] if input_args is None else input_args)
        return original(parser, input_args, *args, **kwargs)


def refuse(given: Sequence[str]) -> None:
    """Raise a ValueError if a flag of fairseq's own positions is given for a model of ours."""
    learned = named_elsewhere("fairseq")["encoder_learned_pos"]
    ours = any(part.startswith(("relpos_", "--arch=relpos_")) for part in given)
    for flag in ("--encoder-learned-pos", "--decoder-learned-pos"):
        if ours and flag in given:
            raise ValueError(
                f"{flag} is a flag of fairseq's own transformer: give --position-scheme {learned}, "
                f"or for one side {flag.replace('learned-pos', 'position-scheme')} {learned}"
            )
