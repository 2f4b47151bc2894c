"""Uses exported folders as their users do, with this interpreter's transformers; prints what came.

    python use_in_transformers.py FOLDER

FOLDER holds `masked`, `classified`, `answering`, `named`, `ranked` and `translated`, as
`relpos export transformers` wrote them.
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.pipelines import SUPPORTED_TASKS

AUTO = {
    "masked": transformers.AutoModelForMaskedLM,
    "classified": transformers.AutoModelForSequenceClassification,
    "answering": transformers.AutoModelForQuestionAnswering,
    "named": transformers.AutoModelForTokenClassification,
    "ranked": transformers.AutoModelForMultipleChoice,
}
TRUST = {"trust_remote_code": True}


def round_trip(folder: Path, out: Path, auto) -> list:
    """Outputs before and after saving and loading; no file of pickles."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    batch = tokenizer(["the old house", "a mouse hears"], padding=True, return_tensors="pt")
    if auto is AUTO["ranked"]:  # the choices of one question
        batch = {name: part[None] for name, part in batch.items()}
    found = []
    for place in (folder, out):
        model = auto.from_pretrained(place, **TRUST).eval()
        with torch.no_grad():
            found.append(model(**batch)[0])
        model.save_pretrained(out)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)  # memory is aligned otherwise
    assert not [path for path in out.iterdir() if path.suffix in (".bin", ".pt")]
    return found[0].tolist()


def train(folder: Path, out: Path) -> dict:
    """Fine-tune on a rule: is the first word `the`?"""
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    words = product(("the", "a"), ("old", "new", "née"), ("house", "horse", "mouse", "hearse"))
    texts = list(map(" ".join, words))
    rows = [tokenizer(text) | {"labels": int(text[0] == "t")} for text in texts]
    transformers.set_seed(2)  # the head is drawn
    model = AUTO["classified"].from_pretrained(folder, num_labels=2, ignore_mismatched_sizes=True, **TRUST)
    how = {"num_train_epochs": 24, "learning_rate": 5e-3, "per_device_train_batch_size": 8, "seed": 1}
    how |= {"use_cpu": True, "report_to": [], "logging_steps": 3, "disable_tqdm": True}
    args = TrainingArguments(str(out), save_strategy="epoch", save_total_limit=1, **how)
    collate = transformers.DataCollatorWithPadding(tokenizer)
    trainer = Trainer(model, args, train_dataset=rows, data_collator=collate)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.save_model()
    again = AUTO["classified"].from_pretrained(out, **TRUST).eval()
    batch = collate(rows)
    with torch.no_grad():
        right = (again(**batch).logits.argmax(-1) == batch["labels"]).float().mean()
    assert (out / "model.safetensors").is_file() and not list(out.rglob("pytorch_model*"))
    return {"first": losses[0], "last": losses[-1], "accuracy": float(right)}


def translate(folder: Path, out: Path) -> list[str]:
    """Translations by beam search, the same after saving and loading."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **TRUST)
    batch = tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    found = []
    for place in (folder, out):
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(place, **TRUST).eval()
        ids = model.generate(**batch, num_beams=3, max_new_tokens=8)
        found.append([tokenizer.decode(row, skip_special_tokens=True) for row in ids])
        model.save_pretrained(out)
    assert found[0] == found[1]
    return found[0]


def main(folder: Path) -> dict:
    """Everything."""
    found = {"transformers": transformers.__version__}
    for name, auto in AUTO.items():
        found[name] = round_trip(folder / name, folder / f"{name}-saved", auto)

    def piped(task: str, name: str):
        tokenizer = AutoTokenizer.from_pretrained(folder / name, **TRUST)
        model = AUTO[name].from_pretrained(folder / name, **TRUST)
        return pipeline(task, model=model, tokenizer=tokenizer)

    found["fill-mask"] = piped("fill-mask", "masked")("the old <mask> hears", top_k=200)
    found["text-classification"] = piped("text-classification", "classified")("the old", top_k=None)
    entities = piped("token-classification", "named")("the old")
    found["token-classification"] = [[one["index"], one["entity"], float(one["score"])] for one in entities]
    if "question-answering" in SUPPORTED_TASKS:  # until 5
        asked = {"question": "the house", "context": "a new mouse makes the old house"}
        found["question-answering"] = piped("question-answering", "answering")(**asked)
    found["translated"] = translate(folder / "translated", folder / "translated-saved")
    found["trained"] = train(folder / "masked", folder / "trained")
    return found


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    folder = Path(sys.argv[1])
    (folder / "found.json").write_text(json.dumps(main(folder)))
