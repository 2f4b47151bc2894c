"""Patches of what fairseq prints: warnings, tracebacks and errors of flags."""

import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from relpos_fairseq.schemes import named_elsewhere

PACKAGE = str(Path(__file__).resolve().parents[1])
ALL = "RELPOS_TRACEBACK"  # 1: every traceback is shown
TEXTS = (
    r"\s*'config' is validated against ConfigStore schema",
    r"In 'config': Usage of deprecated keyword in package header",
    r"'pin_memory' argument is set as true but no accelerator",
    r"Support for mismatched key_padding_mask and attn_mask",
    r"The given NumPy array is not writable",
)


def quiet_warnings() -> None:
    """Silence warnings about fairseq's own use of hydra and torch, on which no user can act."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra(\..*)?$")
    for text in TEXTS:
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", message=r"`torch\.cuda\.amp\.", category=FutureWarning)


def print_errors_in_one_line() -> None:
    """Print errors that this package raises about its input without fifty lines of traceback."""
    original = sys.excepthook

    def hook(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ValueError) and is_about_input(trace) and not os.environ.get(ALL):
            print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
        else:
            original(kind, error, trace)

    sys.excepthook = hook
    # hydra prints what it catches itself, unless it is told to let it through.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def is_about_input(trace: TracebackType | None) -> bool:
    """Tell whether a statement `raise` of this package ended the program, rather than a bug."""
    frames = traceback.extract_tb(trace)
    if not frames or not frames[-1].filename.startswith(PACKAGE):
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line.lstrip().startswith("raise ")


def parse_args_and_arch(original, parser, input_args=None, *args, **kwargs):
    """Name our flag for --encoder-learned-pos and --decoder-learned-pos, where a model of ours is asked for."""
    refuse_given(sys.argv[1:] if input_args is None else input_args)
    return original(parser, input_args, *args, **kwargs)


def refuse_given(given: Sequence[str]) -> None:
    """Raise a ValueError if a flag of fairseq's own positions is given for a model of ours."""
    learned = named_elsewhere("fairseq")["encoder_learned_pos"]
    ours = any(part.startswith(("relpos_", "--arch=relpos_")) for part in given)
    for flag in ("--encoder-learned-pos", "--decoder-learned-pos"):
        if ours and flag in given:
            raise ValueError(
                f"{flag} is a flag of fairseq's own transformer: give --position-scheme {learned}, "
                f"or for one side {flag.replace('learned-pos', 'position-scheme')} {learned}"
            )
