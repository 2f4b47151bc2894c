"""A model that is on disk, in memory: checkpoints are opened here, other files and folders in `formats/`.

    saved = SavedModel.read(path)                       # anyone's, whole: nothing of it is built
    saved = SavedModel.open(path)                       # refuses models and tasks of strangers
    saved.require("relpos translate")                   # and those that another command runs
    folder = saved.find_text(data)                      # of its dictionaries and subwords
    model, cfg, task = saved.build({"data": folder})    # in evaluation mode

A stranger's checkpoint may name any model and task that fairseq has, and some run what their options say: only this
package's own, and fairseq's whose options are plain values, are opened.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from relpos_fairseq.core.plan import PositionPlan
from relpos_fairseq.heads import CLASSIFIER, SPANS, OwnHead, heads_in
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.tensor_files import building, read_checkpoint
from relpos_fairseq.saved.checkpoint import OURS, ROBERTA
from relpos_fairseq.saved.identity import SavedOptions, plan_of, saved_options, tell_replaced
from relpos_fairseq.saved.ledger import Ledger
from relpos_fairseq.text import provenance
from relpos_fairseq.text.assets import check_text, find_assets
from relpos_fairseq.text.dictionary import MASK, NSPECIAL

PACKAGE = "relpos_fairseq."
# Models and tasks of fairseq's whose options are plain values: they run no program and evaluate no text.
MODELS = ("lstm", "lstm_lm", "roberta", "transformer", "transformer_lm")
TASKS = (
    "cross_lingual_lm denoising language_modeling legacy_masked_lm masked_lm multilingual_denoising "
    "multilingual_language_modeling multilingual_masked_lm online_backtranslation sentence_prediction "
    "sentence_ranking span_masked_lm translation translation_from_pretrained_bart translation_lev "
    "translation_multi_simple_epoch"
).split()
MULTILINGUAL = "translation_multi_simple_epoch"  # whose checkpoints translate between several languages
# The command that runs a checkpoint on plain text, by its task.
JOBS = {
    **dict.fromkeys(("translation", "translation_from_pretrained_bart", MULTILINGUAL), "relpos translate"),
    **dict.fromkeys(
        ("language_modeling", "segment_language_modeling", "multilingual_language_modeling"), "relpos sample"
    ),
    **dict.fromkeys(("masked_lm", "multilingual_masked_lm"), "relpos fill"),
    "question_answering": "relpos answer",
    "sentence_prediction": "relpos classify",
}
_HEADS = {  # of tasks that name one: the option, and its kind
    "question_answering": ("span_head_name", SPANS),
    "sentence_prediction": ("classification_head_name", CLASSIFIER),
}
NAMED = ("translation_from_pretrained_bart", "online_backtranslation", MULTILINGUAL)  # whose texts name their language
LANGUAGES, BEGUN = "symbols of languages", "<s> before them"  # what `SavedModel.framing` may be
_EMBEDDING = re.compile(r"embed_tokens\.(embeddings\.\d+\.0\.)?weight$")  # whole, or a part of an adaptive one


_RANDOM: set[Any] = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}


class _Unfilled(TorchFunctionMode):
    """Leaves a new model's tensors as memory has them, where random numbers would fill them before its own are read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass
class Origin:
    """What another library's file or folder says of a model that is now ours, beside the model: for the way back.

    A checkpoint that was converted keeps it under `conversion`.

    Args:
        family: transformers' model_type; empty: it was no folder of transformers.
        head: what the name of its class there ends in; empty: not known.
        labels: names of a classifier's classes, in their order; empty: not known.
        problem_type: transformers', of a classifier; None: not named.
        named: keys of its config.json that are written as they were: names of classes, token types.
        kept: tensors by their names there.
        kept_files: places of files.
        rows: its id of each of our rows, -1 where it has none; None: ours are its own.
        lost: what conversions up to this lost, in words.
    """

    family: str = ""
    head: str = ""
    labels: list[str] = field(default_factory=list)
    problem_type: str | None = None
    named: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    kept_files: list[str] = field(default_factory=list)
    rows: list[int] | None = None
    lost: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Origin:
        """Return what the record of a conversion says."""
        return cls(**{part.name: told[part.name] for part in fields(cls) if told.get(part.name)})

    def record(self) -> dict[str, Any]:
        """Return what there is to say, as `of` takes it."""
        return {part.name: value for part in fields(self) if (value := getattr(self, part.name))}


@dataclass
class SavedModel:
    """A model that is on disk, in memory: what fairseq saves of it, or would save, whichever library it is of.

    What follows `origin` is of formats that `relpos convert` reads.

    Args:
        path: its file or folder.
        checkpoint: what fairseq saves: `model`, its tensors by our names, and `cfg`.
        kind: whose it is, in words.
        origin: what its own library knows of it beside.
        library: the program that computes `outputs`, in words.
        outputs: runs it there on tokens (B, T) and segments (B, T) or None, or on sources (B, S) and beginnings of
            targets (B, T), and returns outputs by name, all in our order of rows; raises NotComparedError where the
            library cannot. None: it cannot be run.
        files: text by its places in a folder of ours: dictionaries, what splits words.
        texts: contents of further such files.
        kept_files: files that no model here reads, by their places in its folder.
        ledger: what became of everything that it holds; None: not recorded.
        notes: assumptions and omissions that the user should know.
        apart: what an exact conversion of it says nothing of.
        steps: what was done so that it is one of ours.
        longest: tokens of an input for which that holds; None: any.
        takes: options of the conversion that its format used.
    """

    path: Path
    checkpoint: dict[str, Any]
    _: KW_ONLY
    kind: str = "fairseq's"
    origin: Origin = field(default_factory=Origin)
    library: str = ""
    outputs: Callable[[Tensor, Tensor | None], dict[str, Tensor]] | None = None
    files: dict[str, Path] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    kept_files: dict[str, Path] = field(default_factory=dict)
    ledger: Ledger | None = None
    notes: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    longest: int | None = None
    takes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path | str, mapped: bool = False) -> SavedModel:
        """Read a checkpoint of anyone's, of which nothing will be built; `mapped` tensors stay where they lie.

        Raises:
            UserError: it is no checkpoint of fairseq's, or not whole.
        """
        return cls(Path(path), read_checkpoint(path, mapped=mapped))

    @classmethod
    def open(cls, path: Path | str, overrides: Mapping[str, Any] = {}) -> SavedModel:
        """Read a checkpoint.

        Args:
            path: its file.
            overrides: options that replace the checkpoint's, each of which is logged.

        Raises:
            UserError: its model or task is neither this package's nor one of MODELS and TASKS.
        """
        with building(path):
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path), mapped=True)
            check_trusted(state, path)
            state.pop("last_optimizer_state", None)  # twice the size of the model, which is built next
            if (saved := saved_options(state)) is not None:
                tell_replaced(saved.model | saved.task, overrides)
            overwrite_args_by_name(state["cfg"], overrides)
        return cls(Path(path), state, origin=Origin.of(state.get("conversion") or {}))

    @classmethod
    def of(
        cls,
        path: Path,
        name: str,
        values: Mapping[str, Any],
        state: dict[str, Tensor],
        task: Mapping[str, Any] = {},
        **more: Any,
    ) -> SavedModel:
        """Return a model of ours, by its registered name, of values of its config, tensors, and options of its task."""
        return cls(path, {"cfg": {"model": {**values, "_name": name}, "task": dict(task)}, "model": state}, **more)

    @cached_property
    def options(self) -> SavedOptions:
        """What it says of its model and its task.

        Raises:
            UserError: it says nothing.
        """
        if (found := saved_options(self.checkpoint)) is None:
            raise UserError(f"{self.path} has neither cfg nor args: it is no checkpoint of fairseq-train")
        return found

    @property
    def name(self) -> str | None:
        """Its model, as it is registered; of ours the one of OURS, whose sizes are registered in its file."""
        name = ARCH_MODEL_NAME_REGISTRY.get(self.options.model_name, self.options.model_name)
        ours = {MODEL_REGISTRY[one].__module__: one for one in OURS}
        return ours.get(MODEL_REGISTRY.get(name, object).__module__, name)

    @property
    def is_encoder(self) -> bool:
        """Whether it is a BERT or RoBERTa, and no model that generates."""
        return self.name == ROBERTA

    @property
    def state(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return self.checkpoint["model"]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Options of its model by name."""
        return {name: value for name, value in self.options.model.items() if name != "_name"}

    @property
    def task(self) -> dict[str, Any]:
        """Options of the task that it was trained on, `_name` among them; empty: not known."""
        return self.options.task

    @property
    def plan(self) -> PositionPlan:
        """The positions of a relpos_roberta."""
        return plan_of(self.values)

    @property
    def heads(self) -> list[OwnHead]:
        """The heads of a RoBERTa, but for the masked LM's."""
        return heads_in(self.state, self.task)

    @property
    def rows(self) -> int:
        """Rows of its input's embedding."""
        return next(iter(count_rows(self.state).values()))

    @property
    def framing(self) -> str | None:
        """What its task alone writes into texts, beside words and </s>: LANGUAGES, BEGUN, or None."""
        name, task = self.options.task_name, self.options.task
        of_several = name == "multilingual_language_modeling" and task.get("add_bos_token")
        if name in NAMED or task.get("add_lang_token") or of_several:
            return LANGUAGES
        return BEGUN if name in {"denoising", "multilingual_denoising", "span_masked_lm"} else None

    def require(self, command: str) -> None:
        """Raise an error if another command of JOBS, or none, runs the checkpoint, or it lacks its task's head.

        fairseq leaves out a head of another size, and makes a random one in its place.
        """
        name = str(self.options.task_name)
        if JOBS.get(name) != command:
            instead = f": use {JOBS[name]}" if name in JOBS else ""
            raise UserError(f"{self.path} is of task {name}, which {command} does not run{instead}")
        if name in _HEADS:
            option, kind = _HEADS[name]
            wanted = kind, self.task.get(option), self.task.get("num_classes", 2)
            if wanted not in [(one.head, one.name, one.outputs) for one in self.heads]:
                raise UserError(f"{self.path} lacks the head of its task: {wanted[1]!r} of {wanted[2]} outputs")

    def find_text(self, data: Path | None) -> Path:
        """Return the folder of its dictionaries and subwords: `data`, or what lies beside it.

        Raises:
            UserError: there is none, or it is of another training.
        """
        return find_assets(self.path, data, self.options.data, provenance.read(self.checkpoint))

    def check_text(self, data: Path) -> None:
        """Raise a UserError for a data folder whose text is not read as in its training, if that is known."""
        check_text(self.path, data, provenance.read(self.checkpoint))

    @property
    def generates(self) -> bool:
        """Whether it is a translation or language model of ours."""
        return any(name.startswith("decoder.positions.") for name in self.state)

    @property
    def updates(self) -> int:
        """The updates after which it was written."""
        history = self.checkpoint.get("optimizer_history") or [{}]
        return int(history[-1].get("num_updates", 0))

    def build(self, overrides: Mapping[str, Any] = {}) -> tuple[Any, Any, Any]:
        """Return its model in evaluation mode, its config and its task; `overrides` are of where its data lie."""
        overwrite_args_by_name(self.checkpoint["cfg"], overrides)  # fairseq forgets them where it gets a state
        with _Unfilled() if self.generates else nullcontext():  # whose tensors must all be there
            models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(self.path)], state=self.checkpoint)
        return models[0].eval(), cfg, task

    def build_anyway(self, data: Path | None) -> tuple[nn.Module, Any]:
        """Return its model and task; without `data` or a text/ beside it they get dictionaries of the right size.

        Raises:
            UserError: the checkpoint or the data cannot be used.
        """
        if data is not None and not (data.is_dir() and any(data.rglob("dict*.txt"))):
            raise UserError(f"--data {data} has no dict*.txt: give a folder of fairseq-preprocess")
        with tempfile.TemporaryDirectory() as folder:
            place, saved = data, self
            if place is None:
                try:
                    place = self.find_text(None)
                except UserError:
                    place = Path(folder)
                    self._stand_in(place)
                    kept = {name: value for name, value in self.checkpoint.items() if name != provenance.KEY}
                    saved = replace(self, checkpoint=kept)  # the dictionaries that stand in are no training's
            try:
                model, _, task = saved.build({"data": str(place), "load_checkpoint_heads": True})
            except Exception as error:  # whatever fairseq finds wrong, of many types
                remedy = f"--data {data} may be another model's" if data else "give its --data"
                raise UserError(f"checkpoint {self.path} does not load: {remedy} ({one_line(error)})") from error
        return model, task

    def _stand_in(self, folder: Path) -> None:
        """Write dictionaries as large as the checkpoint's embeddings."""
        source, target = (own or side for own, side in zip(self.options.languages, ("source", "target"), strict=True))
        # fairseq infers languages that it was not told from the name of any such file.
        (folder / f"languages.{source}-{target}.txt").touch()
        names = {"encoder": source, "decoder": target}
        for side, count in count_rows(self.state).items():
            # Tasks that mask add <mask> themselves where the dictionary lacks it.
            words = [*(f"word{number}" for number in range(count - NSPECIAL - 1)), MASK]
            for name in ("dict.txt", f"dict.{names.get(side)}.txt"):
                (folder / name).write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")


def count_rows(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rows of the embeddings of a model's encoder and decoder, as far as it has them, in this order."""
    rows: Counter[str] = Counter()
    for key in sorted(filter(_EMBEDDING.search, state), reverse=True):
        rows[key.partition(".")[0]] += len(state[key])
    return dict(rows)


def one_line(error: Exception) -> str:
    """Return the first two lines of an error's message as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def check_trusted(state: dict[str, Any], path: Path | str) -> None:
    """Raise the errors of `SavedModel.open` for a checkpoint that is loaded already."""
    saved = saved_options(state)
    if saved is None or not state.get("cfg"):
        raise UserError(f"{path} holds no options of a model: it is no checkpoint of fairseq-train")
    state["args"] = None  # fairseq prefers them to the config, which it has made from them
    for what, name, kind, names, known in (
        ("holds a model", saved.model_name, ARCH_MODEL_REGISTRY.get(saved.model_name), MODELS, MODEL_REGISTRY),
        ("is of task", saved.task_name, None, TASKS, TASK_REGISTRY),
    ):
        kind = kind or known.get(name)
        if kind is None or not (kind.__module__.startswith(PACKAGE) or kind in [known.get(one) for one in names]):
            theirs = ", ".join(names)
            raise UserError(f"{path} {what} {name!r}: only relpos_fairseq's own and fairseq's {theirs} are loaded")
