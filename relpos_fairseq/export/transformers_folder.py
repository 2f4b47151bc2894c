"""A RoBERTa checkpoint as a folder of transformers': weights, heads, tokenizer and card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from relpos_fairseq.conversion.fidelity import Probe, compare
from relpos_fairseq.conversion.huggingface.folder import HEAD, SPAN_HEAD
from relpos_fairseq.conversion.huggingface.relpos import PREFIX, TIED
from relpos_fairseq.conversion.reading import read_source
from relpos_fairseq.conversion.source import SourceModel
from relpos_fairseq.conversion.translation.generating import plain_task
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_folder, sha256_of
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.export.extras import ExportError
from relpos_fairseq.export.transformers import AUTO, RelPosConfig
from relpos_fairseq.export.transformers_text import symbols_of, write_tokenizer
from relpos_fairseq.inference.beside import FOLDER, copy_text, text_folder
from relpos_fairseq.inference.card import write_export_card
from relpos_fairseq.inference.text import TokenizerText, read_text

TOLERANCE = 1e-3  # of logits, in fp32; what rounds differently stays far below
KINDS = {"classification_heads": HEAD, "span_heads": SPAN_HEAD}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        differences: the largest of each output.
        tokenizer: what it is, or why there is none.
    """

    differences: dict[str, float]
    tokenizer: str

    def line(self) -> str:
        parts = (f"{name} {value:.1e}" for name, value in self.differences.items())
        return f"largest differences: {', '.join(parts)}; tokenizer: {self.tokenizer}"


def export(checkpoint: Path, out: Path, data: Path | None, head: str | None) -> Exported:
    """Write a folder that transformers' Auto classes load.

    Args:
        checkpoint: of a RoBERTa.
        out: new folder.
        data: where its dictionary and tokenizer are; None: what lies beside it.
        head: which head goes along; None: the only one of its kind.

    Raises:
        ExportError: the folder exists, several heads, or what transformers loads from it differs.
    """
    if out.exists():
        raise ExportError(f"{out} exists: remove it, or name another folder")
    source = read_source(checkpoint)
    heads = heads_of(source, head)
    text, why = None, ""
    try:
        text = text_folder(checkpoint, data, str(source.task.get("data") or ""))
    except PreparationError as error:
        if data is not None:
            raise
        why = f"none: {error}"
    if source.task.get("_name") == "sentence_prediction" and source.task.get("init_token") is None:
        text, why = None, "none: the model was trained without --init-token 0"
    if text is not None:
        symbols_of(text, source.rows)
    with atomic_folder(out) as folder:
        config = config_of(source, heads, text)
        save_file(tensors_of(source, heads, config), folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        differences = differences_of(source, heads, folder)
        if text is not None:
            copy_text(text, folder)
            segments = source.plan.segment_encoding != "none"
            sides = [(None, source.rows)]
            why = write_tokenizer(folder, "roberta", sides, config.pair_separators, segments, source.plan.longest)
        done = Exported(differences, why)
        write_export_card(checkpoint, folder, "transformers", card_of(done, checkpoint, source))
    return done


def heads_of(source: SourceModel, wanted: str | None) -> dict[str, str]:
    """Return the heads that go along: their beginnings in the checkpoint, and ours.

    Raises:
        ExportError: a head that is not there, or several to choose from.
    """
    found: dict[str, str] = {}
    every = {kind: sorted({key.split(".")[1] for key in source.state if key.startswith(f"{kind}.")}) for kind in KINDS}
    known = [name for names in every.values() for name in names]
    if wanted is not None and wanted not in known:
        raise ExportError(f"--head {wanted}: {source.path} has {', '.join(known) or 'no head'}")
    for kind, names in every.items():
        names = [wanted] if wanted in names else [] if wanted else names
        trained = source.task.get("classification_head_name")
        if len(names) > 1 and kind == "classification_heads" and trained in names:
            names = [trained]
        if len(names) > 1:
            raise ExportError(f"{source.path} has the heads {', '.join(names)}: name one by --head")
        found |= {f"{kind}.{name}.": f"{kind}.{KINDS[kind]}." for name in names}
    return found


def separators_of(source: SourceModel, text: Path | None) -> int:
    """Return how many </s> stand between a pair's texts beside the first one's own."""
    task = source.task
    if task.get("_name") == "sentence_prediction":
        return int(task.get("separator_token") is not None)
    if task.get("separators") in ("1", "2"):
        return int(task["separators"]) - 1
    own = read_text(text) if text else None
    return int(not (isinstance(own, TokenizerText) and own.tokenizer.kind == "wordpiece"))


def config_of(source: SourceModel, heads: dict[str, str], text: Path | None) -> RelPosConfig:
    """Return config.json, the task's options among it."""
    task = plain_task(source.task)
    more: dict[str, Any] = {"architectures": ["RelPosForMaskedLM"]}
    for old, new in heads.items():
        if new.startswith("span"):
            task["span_head_name"] = SPAN_HEAD
            more["architectures"] = ["RelPosForQuestionAnswering"]
            continue
        classes = len(source.state[f"{old}out_proj.weight"])
        more["architectures"] = ["RelPosForSequenceClassification"]
        more["num_labels"] = classes
        task["classification_head_name"] = HEAD
        if task.get("regression_target") or classes == 1:
            more["problem_type"] = "regression"
        elif names := label_names(text, classes):
            more["id2label"] = dict(enumerate(names))
            more["label2id"] = {name: number for number, name in enumerate(names)}
    return RelPosConfig(
        source.values,
        source.rows,
        task,
        pair_separators=separators_of(source, text),
        tie_word_embeddings=not source.values.get("untie_weights_roberta"),
        **more,
    )


def label_names(text: Path | None, classes: int) -> list[str]:
    """Return names of the classes, where the data's dictionary of labels has them."""
    path = text / "label" / "dict.txt" if text else None
    if path is None or not path.is_file():
        return []
    names = [line.rpartition(" ")[0] for line in read_lines(path)][:classes]
    return names if len(names) == classes else []


def tensors_of(source: SourceModel, heads: dict[str, str], config: RelPosConfig) -> dict[str, torch.Tensor]:
    kept = {}
    for name, value in source.state.items():
        old = next((start for start in heads if name.startswith(start)), "")
        if name.startswith(tuple(KINDS)) and not old:
            continue
        kept[PREFIX + heads.get(old, "") + name.removeprefix(old)] = value.clone().contiguous()
    if config.tie_word_embeddings:
        kept.pop(PREFIX + TIED, None)
    return kept


@torch.inference_mode()
def differences_of(source: SourceModel, heads: dict[str, str], folder: Path) -> dict[str, float]:
    """Return the largest difference of every output where there is no padding.

    Raises:
        ExportError: one is too large.
    """
    segments = source.plan.segment_encoding != "none"
    probe = Probe.draw(source.rows, int(source.values["max_positions"]), segments)
    given = {"input_ids": probe.tokens, "attention_mask": probe.real.long()}
    given |= {"token_type_ids": probe.segments} if segments else {}
    ours, theirs = source.outputs(probe.tokens, probe.segments), {}
    names = ["AutoModel", "AutoModelForMaskedLM"]
    names += [
        "AutoModelForQuestionAnswering" if new.startswith("span") else "AutoModelForSequenceClassification"
        for new in heads.values()
    ]
    for name in names:
        found = AUTO[name].from_pretrained(folder).eval()(**given)
        if "start_logits" in found:
            theirs["spans"] = torch.stack([found.start_logits, found.end_logits], -1)
        elif name.endswith("Classification"):
            theirs["classification"] = found.logits
        else:
            theirs["features" if name == "AutoModel" else "logits"] = found[0]
    for old, new in heads.items():  # of several heads each has its name
        kind = "spans" if new.startswith("span") else "classification"
        ours.setdefault(kind, ours.get(f"{kind} {old.split('.')[1]}"))
    ours = {name: value for name, value in ours.items() if name in theirs}
    largest = compare(ours, theirs, probe).largest
    for name, value in largest.items():
        if not value < TOLERANCE:
            raise ExportError(f"{source.path}: transformers' {name} differ by {value:.1e}")
    return largest


def card_of(done: Exported, checkpoint: Path, source: SourceModel) -> dict[str, object]:
    rows: dict[str, object] = {"transformers": transformers.__version__}
    rows["position scheme"] = source.plan.describe()
    rows["parameters"] = sum(
        value.numel() for name, value in source.state.items() if value.is_floating_point() and name != TIED
    )
    rows |= {f"largest difference: {name}": f"{v:.1e}" for name, v in done.differences.items()}
    rows["tokenizer"] = done.tokenizer
    rows["text"] = f"{FOLDER}/" if not done.tokenizer.startswith("none") else "none"
    return rows | {"checkpoint's sha256": sha256_of(checkpoint)}
