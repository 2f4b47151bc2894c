"""Predict labels by a fine-tuned classifier: of raw text, or of data that `relpos prepare glue` wrote."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_fairseq.heads import SEVERAL
from relpos_fairseq.inference.commands import as_json, quietly, writer
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import lines_of
from relpos_fairseq.io.progress import progress
from relpos_fairseq.preparation.glue import shorten
from relpos_fairseq.text.assets import SymbolText, Text, read_text
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import MASK

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
BATCH = 64
BUFFER = 64 * BATCH  # lines that are read, and sorted by length, at a time
XNLI = "XNLI"


@dataclass(frozen=True)
class Splits:
    """The splits of a language that are predicted."""

    scored: str | None  # with labels; None: the language has none
    unlabelled: str | None = None  # a test set without labels, whose predictions are only written


def xnli_splits(data: Path) -> dict[str, Splits]:
    """Return the splits of every language: test sets are scored, or validation sets where no test has labels.

    Raises:
        UserError: the folder, `XNLI` of `relpos prepare glue`, has none.
    """
    there, labelled = ({path.stem for path in (data / part).glob("*_*.idx")} for part in ("input0", "label"))
    kind = "test" if any(name.startswith("test_") for name in labelled) else "valid"
    spoken = {name.partition("_")[2] for name in there if name.startswith(("test_", "valid_"))}
    found = {}
    for language in sorted(spoken):
        scored, test = f"{kind}_{language}", f"test_{language}"
        found[language] = Splits(scored if scored in labelled else None, test if test in there - labelled else None)
    found = {name: splits for name, splits in found.items() if splits != Splits(None)}
    if not found:
        raise UserError(f"{data} has no test_LANGUAGE or valid_LANGUAGE: make it with relpos prepare glue --tasks XNLI")
    return found


class Classifier:
    """A fine-tuned model and its task."""

    def __init__(self, checkpoint: Path, data: Path | None, cpu: bool = False, quantization: str | None = None) -> None:
        """Load a checkpoint of the task sentence_prediction, and the folder of a task's data.

        Args:
            checkpoint: the model's file.
            data: folder of `relpos prepare glue`; None: the text beside the checkpoint.
            cpu: use no GPU.
            quantization: `int8`, `bf16`, or None.

        Raises:
            UserError: the checkpoint is of another task.
        """
        import torch

        from relpos_fairseq.nn.packed import prepare
        from relpos_fairseq.saved.model import SavedModel

        saved = SavedModel.open(checkpoint)
        origin, options = saved.origin, saved.task
        saved.require("relpos classify")  # before another task looks for files that are not there
        self.folder = data or saved.find_text(None)
        self.model, _, self.task = saved.build({"data": str(self.folder)})
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        self.model, self.head = self.model.to(self.device), str(options["classification_head_name"])
        prepare(self.model, quantization)
        known: list[str] = []
        if not options.get("regression_target"):
            labels, classes = self.task.label_dictionary, int(options["num_classes"])
            known = [label for label in labels.symbols[labels.nspecial :] if label != MASK][:classes]
            known += [f"LABEL_{number}" for number in range(len(known), classes)]  # the data have fewer
        self.converted = bool(saved.checkpoint.get("conversion"))
        self.names = in_order(origin.labels, known, checkpoint) if origin.labels and known else known
        self.several = origin.problem_type == SEVERAL  # labels, each true or not

    def predict(self, split: str) -> tuple[list[str], list[str] | None]:
        """Return the predicted labels of a split, and the true ones or None, in the order of the file."""
        outputs, right = self.outputs(split)
        dictionary = self.task.label_dictionary
        predicted = [self.names[int(row.argmax())] for row in outputs]
        if right is None:
            return predicted, None
        return predicted, [dictionary[int(number) + dictionary.nspecial] for number in right]

    def outputs(self, split: str) -> tuple[list[Tensor], list[float] | None]:
        """Return the outputs of the head for every example, and the targets or None, in the order of the file."""
        import torch
        from fairseq import utils

        self.task.load_dataset(split)
        dataset = self.task.datasets[split]
        batches = self.task.get_batch_iterator(
            dataset, max_sentences=BATCH, max_positions=self.task.max_positions()
        ).next_epoch_itr(shuffle=False)
        found, right = {}, {}
        with torch.no_grad():
            for sample in progress(batches, description=split, unit="batches"):
                if self.device.type == "cuda":
                    sample = utils.move_to_cuda(sample)
                logits, _ = self.model(**sample["net_input"], features_only=True, classification_head_name=self.head)
                places = sample["id"].view(-1).tolist()
                found.update(zip(places, logits.float().cpu(), strict=True))
                if "target" in sample:
                    right.update(zip(places, sample["target"].view(-1).tolist(), strict=True))
        if sorted(found) != list(range(len(dataset))):
            raise UserError(
                f"{split}: {len(found)} of {len(dataset)} examples were evaluated; the model takes "
                f"{self.task.max_positions()} tokens: relpos prepare glue --max-length"
            )
        order = range(len(dataset))
        return [found[n] for n in order], [right[n] for n in order] if right else None

    def of_texts(self, texts: Mapping[int, tuple[str, ...]], cut: bool = False) -> dict[int, Tensor]:
        """Return the head's outputs (classes,) for numbered texts, computed in batches of about equal lengths.

        Args:
            texts: one or two sentences each, as many as an example of the training data has.
            cut: shorten what is too long, as `relpos prepare glue` does; else it is an error.
        """
        import torch
        from fairseq import utils
        from fairseq.data.data_utils import collate_tokens

        words = self.task.source_dictionary
        encoded = {number: self._encode(one, cut, number) for number, one in texts.items()}
        order = sorted(encoded, key=lambda n: -sum(map(len, encoded[n])))
        found: dict[int, Tensor] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            rows = [torch.tensor([*np.concatenate(encoded[n])]) for n in batch]
            sample = {"src_tokens": collate_tokens(rows, words.pad()), "src_lengths": torch.tensor([*map(len, rows)])}
            if getattr(self.task, "wants_segments", False):
                from relpos_fairseq.tasks.sentence_pairs import segments_of_parts

                segments = [segments_of_parts([*map(len, encoded[n])]) for n in batch]
                sample["segments"] = collate_tokens(segments, 0)
            sample = utils.move_to_cuda(sample) if self.device.type == "cuda" else sample
            with torch.no_grad():
                logits, _ = self.model(**sample, features_only=True, classification_head_name=self.head)
            found.update(zip(batch, logits.float().cpu(), strict=True))
        return found

    @cached_property
    def text(self) -> Text:
        """How text becomes symbols, as the folder of the data says."""
        found = read_text(self.folder)
        if isinstance(found, SymbolText):
            logger.warning(
                "%s has no tokenizer (relpos prepare glue writes it, in input0): text is taken as symbols of its "
                "dict.txt, joined by spaces",
                self.folder,
            )
        return found

    @property
    def sentences(self) -> tuple[int, ...]:
        """How many sentences an example may have: as many as in the training data, 1 or 2 where they are unknown."""
        if self.converted:
            return 1, 2
        return (2,) if (self.folder / "input1" / DICTIONARY).is_file() else (1,)

    def _encode(self, texts: tuple[str, ...], cut: bool, number: int) -> list[np.ndarray]:
        """Return the ids of each sentence of an example, with the special tokens that the task puts around them."""
        words, cfg = self.task.source_dictionary, self.task.cfg
        if len(texts) not in self.sentences or not all(texts):
            known = "a converted model takes", "the model was trained on sentences:", "the model was trained on pairs:"
            wanted = "one sentence, or two, parted by a tab,", "give one sentence", "give two, parted by a tab,"
            kind = 0 if self.converted else self.sentences[0]
            raise UserError(f"line {number}: {known[kind]} {wanted[kind]} a line")
        parts = tuple(np.array([*map(words.index, self.text.encode(one))], dtype=np.int64) for one in texts)
        before = (cfg.init_token, cfg.separator_token)
        longest = int(min(self.model.max_positions(), 10**6))
        special = sum(1 + (token is not None) for token, _ in zip(before, parts, strict=False))
        if (size := special + sum(map(len, parts))) > longest:
            if not cut:
                raise UserError(
                    f"line {number} has {size:,} symbols, and the model takes {longest:,}: shorten it, or give "
                    "--on-long-line cut"
                )
            parts = shorten(parts, longest)
        return [
            np.array([*([] if token is None else [token]), *part, words.eos()])
            for token, part in zip(before, parts, strict=False)
        ]


def classify_lines(args: Any) -> None:
    """Run `relpos classify`: a label and its probability, or a number, for each line."""
    quietly()
    typed = args.file is None and sys.stdin.isatty()
    lines, done = lines_of(args.file), 0
    if args.data:  # whose text is read here, and not binarised data alone
        from relpos_fairseq.saved.model import SavedModel

        SavedModel.read(args.checkpoint, mapped=True).find_text(args.data)
    classifier = Classifier(args.checkpoint, args.data, args.cpu, args.quantization)
    with writer(args.out) as write, progress(description="classify", unit="lines") as bar:
        while chunk := list(islice(lines, 1 if typed else BUFFER)):
            numbered = dict(enumerate(chunk, done + 1))
            shape = str if classifier.converted else str.strip  # whose own library keeps spaces
            texts = {n: tuple(map(shape, line.split("\t"))) for n, line in numbered.items() if line.strip()}
            outputs = classifier.of_texts(texts, args.on_long_line == "cut")
            for number, line in numbered.items():
                write(_shown(classifier, outputs.get(number), {"line": number, "source": line}, args))
            done += len(chunk)
            bar.update(len(chunk))


def _shown(classifier: Classifier, output: Tensor | None, known: dict[str, Any], args: Any) -> str:
    """Return the line for an example; an empty one (no output) has no label."""
    names, several = classifier.names, classifier.several
    if output is None:
        empty = "labels" if several else "label" if names else "score"
        return as_json(known | {empty: None}) if args.jsonl else ""
    if not names:
        scores = [round(one, 4) for one in output.tolist()]
        said = {"score": scores[0]} if len(scores) == 1 else {"scores": scores}
        return as_json(known | said) if args.jsonl else "\t".join(f"{one:.4f}" for one in scores)
    probabilities = [round(one, 6) for one in (output.sigmoid() if several else output.softmax(-1)).tolist()]
    every = dict(zip(names, probabilities, strict=True))
    chosen = [name for name in names if every[name] > 0.5] if several else [names[int(output.argmax())]]
    if not args.jsonl:
        return f"{', '.join(chosen)}\t{', '.join(f'{every[name]:.4f}' for name in chosen)}"
    said = {"labels": chosen} if several else {"label": chosen[0], "probability": every[chosen[0]]}
    return as_json(known | said | {"probabilities": every})


def in_order(own: Sequence[str], known: Sequence[str], checkpoint: Path) -> list[str]:
    """Return the data's labels in the order of the classes of a converted model, which has an order of its own.

    Raises:
        UserError: the model has other labels.
    """
    by_name = {label.lower(): label for label in known}
    names = [by_name.get(label.lower()) for label in own]
    if None in names:
        raise UserError(f"{checkpoint} predicts {', '.join(own)}, and the data's labels are {', '.join(known)}")
    return names
