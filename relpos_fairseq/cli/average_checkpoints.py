#!/usr/bin/env python
"""Averages the parameters of checkpoints of one training, as Vaswani et al. 2017 do (section 6.1).

    python scripts/average_checkpoints.py --inputs checkpoints/wmt --last 5 --output avg.pt
    python scripts/average_checkpoints.py --inputs checkpoints/wmt --last-updates 5 --output avg.pt
    python scripts/average_checkpoints.py --inputs one.pt two.pt --output avg.pt

Checkpoints are loaded safely (weights_only). All must be of the same position scheme, which the
result keeps, and have the same tensors. Sums are made in double precision. The optimizer's state is
left out: the result is for translating and for starting anew, not for resuming.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_path

EPOCH, UPDATE = re.compile(r"checkpoint(\d+)\.pt"), re.compile(r"checkpoint_\d+_(\d+)\.pt")
SCHEME = "scheme_version"


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = whole.add_argument
    add("--inputs", type=Path, nargs="+", required=True, help="checkpoints, or their one folder")
    add("--last", type=int, metavar="N", help="of a folder: the last N epochs' checkpoints")
    add("--last-updates", type=int, metavar="N", help="of a folder: the last N by updates")
    add("--output", type=Path, required=True)
    return whole


def choose(args: argparse.Namespace) -> list[Path]:
    """Returns the checkpoints that are meant.

    Raises:
        PreparationError: The folder has fewer, or options do not go together.
    """
    if not (args.last or args.last_updates):
        folders = [path for path in args.inputs if path.is_dir()]
        if folders:
            raise PreparationError(f"{folders[0]} is a folder: add --last N or --last-updates N")
        return args.inputs
    number = args.last or args.last_updates
    if len(args.inputs) != 1 or not args.inputs[0].is_dir() or (args.last and args.last_updates):
        raise PreparationError("--last or --last-updates goes with one folder in --inputs")
    pattern = EPOCH if args.last else UPDATE
    named = [(pattern.fullmatch(path.name), path) for path in args.inputs[0].glob("*.pt")]
    found = sorted((int(match.group(1)), path) for match, path in named if match)
    if number < 1 or len(found) < number:
        raise PreparationError(
            f"{args.inputs[0]} has {len(found)} checkpoints like {pattern.pattern}, "
            f"{number} asked for: keep more (--keep-last-epochs, --keep-interval-updates)"
        )
    return [path for _, path in found[-number:]]


def load(path: Path) -> dict:
    """Loads a checkpoint without running what may be in it.

    Raises:
        PreparationError: It is no checkpoint of fairseq's.
    """
    import torch

    if not path.is_file():
        raise PreparationError(f"{path} is not a file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling has no common class of errors
        reason = str(error).split("\n")[0]
        raise PreparationError(f"{path} could not be loaded ({reason}): is it whole?") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise PreparationError(f"{path} is no checkpoint of fairseq's: it has no model")
    return state


def average(paths: Sequence[Path]) -> dict:
    """Returns the first checkpoint's state with all checkpoints' mean parameters.

    Raises:
        PreparationError: They are of different schemes or models.
    """
    import torch

    first = load(paths[0])
    model = first["model"]
    sums = {k: v.double() for k, v in model.items() if torch.is_floating_point(v)}
    for path in paths[1:]:
        other = load(path)["model"]
        check_same(paths[0], model, path, other)
        for name in sums:
            sums[name] += other[name].double()
    first["model"] = {
        name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value
        for name, value in model.items()
    }
    first["last_optimizer_state"] = None
    return first


def check_same(first: Path, model: dict, path: Path, other: dict) -> None:
    """Checks that two models may be averaged.

    Raises:
        PreparationError: With what differs.
    """
    import torch

    from relpos_fairseq.placement import decode_text

    # Schemes first: what else differs follows from them.
    for name in sorted(model.keys() | other.keys(), key=lambda n: (not n.endswith(SCHEME), n)):
        here, there = model.get(name), other.get(name)
        if name.endswith(SCHEME) and not (
            here is not None and there is not None and torch.equal(here, there)
        ):
            schemes = [
                decode_text(value) if value is not None else "none" for value in (here, there)
            ]
            raise PreparationError(
                f"{first} has [{schemes[0]}] in {name}, {path} has [{schemes[1]}]: "
                "only checkpoints of one scheme can be averaged"
            )
        if here is None or there is None:
            raise PreparationError(f"{name} is in {first if there is None else path} alone")
        if here.shape != there.shape:
            raise PreparationError(
                f"{name} has shape {tuple(here.shape)} in {first}, {tuple(there.shape)} in {path}"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parser().parse_args(argv)
    paths = choose(args)
    import torch

    import relpos_fairseq  # noqa: F401  (says which classes a checkpoint may hold)

    state = average(paths)
    with atomic_path(args.output) as temporary:
        torch.save(state, temporary)
    print(f"averaged {len(paths)} checkpoints into {args.output}:")
    print("\n".join(f"  {path}" for path in paths), flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
