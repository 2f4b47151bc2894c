"""Predict the labels of sentences by a fine-tuned classifier, on data that `relpos prepare glue` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.progress import progress

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 64
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

    def __init__(self, checkpoint: Path, data: Path, cpu: bool = False) -> None:
        """Load a checkpoint of the task sentence_prediction, and the folder of a task's data.

        Raises:
            UserError: the checkpoint is of another task.
        """
        import torch
        from fairseq import checkpoint_utils

        from relpos_fairseq.inference.checkpoints.loading import read_trusted

        if not checkpoint.is_file():
            raise UserError(f"there is no checkpoint {checkpoint}")
        overrides = {"data": str(data)}
        state = read_trusted(checkpoint, overrides)
        trained = state["cfg"]["task"]
        name = getattr(trained, "classification_head_name", None)
        if name is None:  # before another task looks for files that are not there
            raise UserError(
                f"{checkpoint} is no fine-tuned classifier: it was trained with task "
                f"{trained._name}; fine-tune with relpos finetune glue --keep-models"
            )
        models, _, self.task = checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], arg_overrides=overrides, state=state
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        self.model, self.head = models[0].eval().to(self.device), str(name)
        known: list[str] = []
        if not trained.regression_target:
            first = self.task.label_dictionary.nspecial
            known = self.task.label_dictionary.symbols[first : first + trained.num_classes]
        own = (state.get("conversion") or {}).get("labels")
        self.names = in_order(own, known, checkpoint) if own else known

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
