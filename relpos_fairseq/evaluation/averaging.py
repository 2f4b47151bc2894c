"""Average the parameters of checkpoints of one training."""

import re
from collections.abc import Sequence
from pathlib import Path

import fairseq  # noqa: F401  (the plugin says which classes a checkpoint may hold)
import torch

from relpos_fairseq.core.plan import decode_text
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_path, check_outputs
from relpos_fairseq.io.progress import progress, say
from relpos_fairseq.io.tensor_files import check_finite, save
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text import provenance
from relpos_fairseq.text.assets import copy_assets, find_assets, text_folders

EPOCH, UPDATE = re.compile(r"checkpoint(\d+)\.pt"), re.compile(r"checkpoint_\d+_(\d+)\.pt")
LAST = "checkpoint_last.pt"
SCHEME = "scheme_version"
SHOWN = 6  # files of a folder in an error


def choose(inputs: list[Path], last: int | None, last_updates: int | None) -> list[Path]:
    """Return the checkpoints to average: those that are named, or the last ones of a folder.

    Raises:
        UserError: The folder has fewer, or options do not go together.
    """
    if not (last or last_updates):
        folders = [path for path in inputs if path.is_dir()]
        if folders:
            raise UserError(f"{folders[0]} is a folder: add --last N or --last-updates N")
        return inputs
    number = last or last_updates
    if len(inputs) != 1 or not inputs[0].is_dir() or (last and last_updates):
        raise UserError("--last or --last-updates goes with one folder")
    found = _numbered(inputs[0], EPOCH if last else UPDATE)
    if number < 1 or len(found) < number:
        raise UserError(_too_few(inputs[0], number, len(found), is_last=bool(last)))
    end = inputs[0] / LAST
    ends = [SavedModel.read(path, mapped=True).updates for path in (end, found[-1]) if path.is_file()]
    if len(ends) == 2 and ends[0] > ends[1]:
        say(f"{end} is of update {ends[0]:,}, later than these: to take it too, name checkpoints one by one")
    return found[-number:]


def _numbered(folder: Path, pattern: re.Pattern) -> list[Path]:
    """Return the checkpoints of a folder whose names match, by the number in them."""
    named = [(pattern.fullmatch(path.name), path) for path in folder.glob("*.pt")]
    return [path for _, path in sorted((int(match.group(1)), path) for match, path in named if match)]


def _too_few(folder: Path, number: int, found: int, is_last: bool) -> str:
    """Return an error that says what is in a folder with too few checkpoints of a kind, and what goes with it."""
    like, flag = ("checkpoint7.pt", "--last-updates") if is_last else ("checkpoint_2_5000.pt", "--last")
    keep = "--keep-last-epochs" if is_last else "--save-interval-updates and --keep-interval-updates"
    names = sorted(path.name for path in folder.glob("*.pt"))
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    others = len(_numbered(folder, UPDATE if is_last else EPOCH))
    instead = f"give {flag} {min(number, others)}, " if others and number > 0 else ""
    return (
        f"{folder} has {found} checkpoints like {like}, {number} asked for; its files are {shown or 'none'}: "
        f"{instead}name the checkpoints one by one, or train with {keep}"
    )


def write_average(paths: Sequence[Path], output: Path, ema: bool = False) -> None:
    """Write the mean of checkpoints as a checkpoint, with the text assets in its folder; `ema` as in `average`."""
    check_outputs({"--out": output}, {path.name: path for path in paths})
    state = average(paths, ema)
    kept = provenance.read(state)  # a checkpoint without options is averaged too
    text = find_assets(paths[0], None, kept=kept) if text_folders(paths[0].parent) else None
    with atomic_path(output) as temporary:
        save(state, temporary)
    if text is not None:
        copy_assets(text, output.parent)


def load_state(path: Path, ema: bool = False) -> dict:
    """Load a checkpoint without running code that may be in it.

    Args:
        path: the checkpoint.
        ema: in place of its model's parameters take the moving averages that `--store-ema` keeps beside them.

    Raises:
        UserError: It is no checkpoint of fairseq's, or has no averages.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    state = SavedModel.read(path).checkpoint
    if ema:
        extra = state.get("extra_state") or {}
        kept = (extra.pop("ema", None) or {}) | (extra.pop("ema_fp32_params", None) or {})  # the latter are exact
        if not kept:
            raise UserError(f"{path} keeps no moving averages: train with --store-ema, or leave --ema out")
        state["model"] |= kept
    return state


def average(paths: Sequence[Path], ema: bool = False) -> dict:
    """Return the state of the first checkpoint with the mean parameters of all, or (`ema`) of their moving averages.

    Raises:
        UserError: They are of different schemes or models, or a parameter is not finite.
    """
    first = load_state(paths[0], ema)
    model = first["model"]
    check_finite(model, paths[0])
    sums = {k: v.double() for k, v in model.items() if torch.is_floating_point(v)}
    for path in progress(paths[1:], description="average", unit="checkpoints"):
        state = load_state(path, ema)
        other = state["model"]
        check_same(paths[0], model, path, other)
        check_finite(other, path)
        check_same_text(paths[0], first, path, state)
        for name in sums:
            sums[name] += other[name].double()
    first["model"] = {
        name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value for name, value in model.items()
    }
    first["last_optimizer_state"] = None
    return first


def check_same_text(first: Path, state: dict, path: Path, other: dict) -> None:
    """Check that two checkpoints were trained with the same dictionaries and units, as far as they keep their hashes.

    Raises:
        UserError: With what differs.
    """
    here, there = provenance.read(state), provenance.read(other)
    for part in sorted(here.keys() & there.keys()):
        names = [name for name, value in here[part].items() if there[part].get(name, value) != value]
        if names:
            raise UserError(
                f"{first} and {path} were trained with different {part}: {', '.join(names)}; checkpoints of one "
                f"training can be averaged"
            )


def check_same(first: Path, model: dict, path: Path, other: dict) -> None:
    """Check that two models may be averaged.

    Raises:
        UserError: With what differs.
    """
    # Schemes first: what else differs follows from them.
    for name in sorted(model.keys() | other.keys(), key=lambda n: (not n.endswith(SCHEME), n)):
        here, there = model.get(name), other.get(name)
        if name.endswith(SCHEME) and not (here is not None and there is not None and torch.equal(here, there)):
            schemes = [decode_text(value) if value is not None else "none" for value in (here, there)]
            raise UserError(
                f"{first} has [{schemes[0]}] in {name}, {path} has [{schemes[1]}]: "
                "only checkpoints of one scheme can be averaged"
            )
        if here is None or there is None:
            raise UserError(f"{name} is in {first if there is None else path} alone")
        if here.shape != there.shape:
            raise UserError(f"{name} has shape {tuple(here.shape)} in {first}, {tuple(there.shape)} in {path}")
