"""Patch how fairseq's commands read their arguments: what an evaluation is not told, and what fails later.

`parse_args_and_arch` is the patch (README.md); what it calls raises a ValueError or says nothing.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fairseq.dataclass.configs import GenerationConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from omegaconf import OmegaConf

from relpos_fairseq.io.tensor_files import building, load
from relpos_fairseq.patches.processes import refuse_copies, refuse_task
from relpos_fairseq.saved.identity import WHERE, plain, saved_options, tell_replaced
from relpos_fairseq.schemes import named_elsewhere

# Options without which a task of fairseq ends in an error of None or of hydra, and what sets them.
NEEDS = {
    "translation_from_pretrained_bart": {"langs": "--langs"},
    "online_backtranslation": {"mono_langs": "--mono-langs", "valid_lang_pairs": "--valid-lang-pairs"},
    "sentence_prediction": {"classification_head_name": "--criterion sentence_prediction"},
}
# The least value of an option of generation with which fairseq's search begins.
LEAST = {"beam": 1, "nbest": 1}
HELP = {"-h", "--help"}
OF_SEARCH = frozenset(field.name for field in fields(GenerationConfig))


def parse_args_and_arch(
    original, parser, input_args=None, parse_known=False, suppress_defaults=False, modify_parser=None
):
    """Take from a checkpoint of ours what an evaluation is not told of its task; refuse copies of a generation.

    Names our flag for --encoder-learned-pos and --decoder-learned-pos. --help beside --arch has the model's flags.
    """
    arguments = sys.argv[1:] if input_args is None else input_args
    if HELP.intersection(arguments) and any(re.match(r"--arch(=|$)|-a", word) for word in arguments):
        others = [word for word in arguments if word not in HELP]
        return original(parser, others, modify_parser=print_help_at_last(modify_parser))
    refuse_given(arguments)
    usage = parser.error

    def error(message: str) -> None:
        refuse_values(parser, arguments)
        usage(message)

    parser.error = error
    if suppress_defaults:  # fairseq asks once more, which of them were given
        parser.asks_again = True
        return original(parser, input_args, parse_known, suppress_defaults, modify_parser)
    saved, overrides = evaluated_task(parser, input_args)
    if not saved and parser.get_default("task") is None:
        refuse_without_task(parser, input_args)

    def modify(parser: argparse.ArgumentParser) -> None:
        if modify_parser is not None:
            modify_parser(parser)
        known = {action.dest for action in parser._actions}
        parser.set_defaults(**{name: value for name, value in (saved | overrides).items() if name in known})
        for action in parser._actions:  # the criterion's are the checkpoint's
            action.required = action.required and not action.option_strings

    parsed = original(parser, input_args, parse_known, modify_parser=modify if saved else modify_parser)
    known = parsed[0] if parse_known else parsed
    refuse_copies(known)
    refuse_misfit(known, {} if saved else NEEDS)
    if saved:
        refuse_model_flags(parser, arguments)
    if saved and not getattr(parser, "asks_again", False):
        tell_replaced(saved, vars(known))
    return parsed


def print_help_at_last(modify: Callable[[argparse.ArgumentParser], None] | None) -> Callable:
    """Return a `modify_parser` that prints --help and exits at its second call, when the parser has all flags."""
    calls = itertools.count()

    def both(parser: argparse.ArgumentParser) -> None:
        if modify is not None:
            modify(parser)
        if next(calls):
            parser.print_help()
            parser.exit()

    return both


def refuse_misfit(args: argparse.Namespace, needs: dict[str, dict[str, str]] = NEEDS) -> None:
    """Raise a ValueError for a task that does not train the architecture, or lacks what it `needs`."""
    task = getattr(args, "task", None)
    refuse_task(task, getattr(args, "arch", None))
    for name, least in LEAST.items():
        if (value := getattr(args, name, least)) < least:
            raise ValueError(f"--{name} must be >= {least}, got {value}")
    for name, value in vars(args).items():
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and name in OF_SEARCH)):
            raise ValueError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
    if missing := [flag for name, flag in needs.get(task, {}).items() if not getattr(args, name, None)]:
        raise ValueError(f"--task {task} needs {' and '.join(missing)}")


def refuse_model_flags(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Raise a ValueError for a model's flag where no --arch is given: the checkpoint's model is evaluated."""
    groups = [group for group in parser._action_groups if group.title == "Model-specific configuration"]
    flags = {flag for group in groups for action in group._group_actions for flag in action.option_strings}
    for word in given if "--arch" not in given else ():
        if (flag := word.split("=")[0]) in flags:
            raise ValueError(f"{flag}: the model is that of the checkpoint; leave the flag out")


def refuse_values(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Raise a ValueError where a flag that takes no value is given True or False, as before fairseq 0.10."""
    for flag, value in itertools.pairwise(given):
        action = parser._option_string_actions.get(flag)
        if value.lower() in ("true", "false") and action is not None and action.nargs == 0:
            raise ValueError(
                f"{flag} {value}: the flag takes no value; alone it means {action.const}, and without it "
                f"{not action.const}"
            )


def refuse_without_task(parser: argparse.ArgumentParser, given: Sequence[str] | None) -> None:
    """Raise a ValueError for fairseq-validate where neither --task nor a checkpoint of ours names the task."""
    args = parser.parse_known_args(given)[0]
    if args.task is not None or not hasattr(args, "path"):
        return
    if not args.path:
        raise ValueError("give --path CHECKPOINT")
    first = args.path.split(os.pathsep)[0]
    if not os.path.exists(first):
        raise ValueError(f"--path {first} does not exist")
    load(first, mapped=True)
    raise ValueError(f"--path {first} is no checkpoint of a model of ours, which names its task: give --task")


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return --model-overrides of parsed arguments as a dict: values by option.

    Raises:
        ValueError: they are no dict.
    """
    try:
        found = ast.literal_eval(args.model_overrides)
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"--model-overrides {args.model_overrides}: give a dict, such as \"{{'dropout': 0.1}}\"")
    return found


def evaluated_task(parser: argparse.ArgumentParser, given: Sequence[str] | None) -> tuple[dict, dict]:
    """Return the task and its options of the checkpoint that a command evaluates, and other defaults of flags.

    These are what --model-overrides replaces, and the checkpoint's architecture and criterion, whose options the task's
    refer to, and which a command takes from the checkpoint whatever their flags say. A criterion that is not registered
    here is left out: translations and eval-lm need none.

    Both are empty for another command, another model than ours, and a file that is refused where it is loaded.
    """
    if not {"path", "model_overrides"} <= {action.dest for action in parser._actions}:
        return {}, {}
    args = parser.parse_known_args(given)[0]
    overrides = overrides_of(args)
    try:
        state = load((args.path or "").split(os.pathsep)[0], mapped=True)
        saved = saved_options(state)
    except Exception:  # no checkpoint, or no dict
        return {}, {}
    if saved is None or not (saved.model_name or "").startswith("relpos_") or saved.task_name not in TASK_REGISTRY:
        return {}, {}
    of_task = argparse.ArgumentParser(add_help=False)
    TASK_REGISTRY[saved.task_name].add_args(of_task)
    names = {action.dest for action in of_task._actions if not re.fullmatch(WHERE, action.dest)}
    found = {name: value for name, value in saved.task.items() if name in names}
    found = {name: value for name, value in found.items() if not str(value).startswith(("${", "???"))}
    if (kind := TASK_DATACLASS_REGISTRY.get(saved.task_name)) is not None:
        with building(args.path):
            OmegaConf.merge(OmegaConf.structured(kind), found)
    replaced = {name: overrides[name] for name in found if name in overrides} | {"arch": saved.model_name}
    criterion = plain((state.get("cfg") or {}).get("criterion") or {}).get("_name")
    is_here = criterion in REGISTRIES["criterion"]["registry"]
    return found | {"task": saved.task_name}, replaced | ({"criterion": criterion} if is_here else {})


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
    if ours and "--cross-self-attention" in given:
        raise ValueError("--cross-self-attention would mix the positions of source and target: leave it out")
