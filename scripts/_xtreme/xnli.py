"""Accuracy of a sentence pair classifier on splits of prepare_glue.py."""

from __future__ import annotations

from pathlib import Path

from _prepare.errors import PreparationError
from _prepare.progress import progress

BATCH = 64
NAME = "XNLI"


def languages(data: Path) -> dict[str, str]:
    """Language to split: the labelled test sets, or the validation sets where none is.

    Args:
        data: `XNLI` of prepare_glue.py.

    Raises:
        PreparationError: there is none.
    """
    names = sorted(path.stem for path in (data / "label").glob("*_*.idx"))
    for kind in ("test", "valid"):
        found = {name.partition("_")[2]: name for name in names if name.startswith(f"{kind}_")}
        if found:
            return found
    raise PreparationError(
        f"{data} has no test_LANGUAGE or valid_LANGUAGE: make it with prepare_glue.py --tasks XNLI"
    )


class Classifier:
    """A fine-tuned model and its task."""

    def __init__(self, checkpoint: Path, data: Path, cpu: bool = False) -> None:
        """Load both.

        Args:
            checkpoint: of finetune_glue.py, or of fairseq-train.
            data: `XNLI` of prepare_glue.py.
            cpu: whether to leave a GPU alone.

        Raises:
            PreparationError: the checkpoint is none of a sentence_prediction.
        """
        import torch
        from fairseq import checkpoint_utils

        import relpos_fairseq  # noqa: F401

        if not checkpoint.is_file():
            raise PreparationError(f"there is no checkpoint {checkpoint}")
        overrides = {"data": str(data)}
        state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), overrides)
        trained = state["cfg"]["task"]
        name = getattr(trained, "classification_head_name", None)
        if name is None:  # said before a task looks for files that are not there
            raise PreparationError(
                f"{checkpoint} is no fine-tuned classifier: it was trained with task "
                f"{trained._name}; fine-tune with finetune_glue.py --keep-models"
            )
        models, _, self.task = checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], arg_overrides=overrides, state=state
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        self.model, self.head = models[0].eval().to(self.device), str(name)

    def predict(self, split: str) -> tuple[list[int], list[int]]:
        """Classes that are predicted and the right ones, in the order of the file."""
        import torch
        from fairseq import utils

        self.task.load_dataset(split)
        dataset = self.task.datasets[split]
        batches = self.task.get_batch_iterator(
            dataset, max_sentences=BATCH, max_positions=self.task.max_positions()
        ).next_epoch_itr(shuffle=False)
        found = {}
        with torch.no_grad():
            for sample in progress(batches, description=split, unit="batches"):
                if self.device.type == "cuda":
                    sample = utils.move_to_cuda(sample)
                logits, _ = self.model(
                    **sample["net_input"],
                    features_only=True,
                    classification_head_name=self.head,
                )
                answers = zip(
                    sample["id"].view(-1).tolist(), logits.argmax(dim=1).tolist(),
                    sample["target"].view(-1).tolist(), strict=True,
                )  # fmt: skip
                found.update({number: pair for number, *pair in answers})
        if sorted(found) != list(range(len(dataset))):
            raise PreparationError(
                f"{split}: {len(found)} of {len(dataset)} examples were evaluated; the model takes "
                f"{self.task.max_positions()} tokens: prepare_glue.py --max-length"
            )
        predicted, right = zip(*(found[number] for number in range(len(dataset))), strict=True)
        return list(predicted), list(right)

    def labels(self, predicted: list[int]) -> list[str]:
        """Names of classes."""
        dictionary = self.task.label_dictionary
        return [dictionary[number + dictionary.nspecial] for number in predicted]
