"""Fine-tune an exported RoBERTa on MRPC with transformers' Trainer.

    relpos export transformers checkpoints/checkpoint_best.pt --out folder
    python examples/roberta/finetune_mrpc.py folder --data glue_data --out mrpc

`--data` has MRPC/train.tsv and MRPC/dev.tsv (.gz will do); Trainer needs `pip install accelerate`.
The model with the best F1 on dev is in `--out`, and `relpos convert mrpc --to same --out DST`
brings it back to fairseq.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.metrics import f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from relpos_fairseq.preparation.glue_tasks import GLUE, read_examples, sources_of

TASK = GLUE["MRPC"]


def read(data: Path, split: str, tokenizer, longest: int) -> list[dict]:
    """Return the pairs of a split (`train` or `valid`) as ids and labels."""
    found = []
    for one in read_examples(sources_of(TASK, data)[split], TASK):
        ids = tokenizer(one.first, one.second, truncation=True, max_length=longest)
        found.append(dict(ids) | {"labels": TASK.labels.index(one.label)})
    return found


def scores(prediction) -> dict[str, float]:
    """Return F1 and accuracy of logits (N, 2) and labels (N,)."""
    chosen, labels = np.argmax(prediction.predictions, axis=-1), prediction.label_ids
    return {"f1": f1_score(labels, chosen), "accuracy": float((chosen == labels).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of relpos export transformers")
    parser.add_argument("--data", type=Path, required=True, help="folder that has MRPC/")
    parser.add_argument("--out", type=Path, required=True, help="of the fine-tuned model")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--longest", type=int, default=128, help="tokens of a pair; others are cut")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder, trust_remote_code=True)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.folder, num_labels=len(TASK.labels), trust_remote_code=True
    )
    train, valid = (read(args.data, split, tokenizer, args.longest) for split in ("train", "valid"))
    trainer = Trainer(
        model,
        TrainingArguments(
            str(args.out),
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            weight_decay=0.01,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="f1",
            report_to=[],
            seed=args.seed,
        ),
        train_dataset=train,
        eval_dataset=valid,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=scores,
    )
    trainer.train()
    found = trainer.evaluate()
    print(f"dev F1 {found['eval_f1']:.4f}, accuracy {found['eval_accuracy']:.4f}")
    trainer.save_model()
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
