"""Read what is converted: a fairseq RoBERTa, one of ours, or a Hugging Face folder.

All become a `SourceModel`: tensors under our names, the values of our config that they need, and a
function that runs the original as its own library does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from relpos_fairseq.conversion import layouts
from relpos_fairseq.conversion.checkpoints import beside, check, from_checkpoint, read_checkpoint
from relpos_fairseq.conversion.fidelity import outputs_of
from relpos_fairseq.conversion.huggingface import relpos
from relpos_fairseq.conversion.huggingface.files import read_json
from relpos_fairseq.conversion.huggingface.folder import HuggingFaceModel, read_folder
from relpos_fairseq.conversion.huggingface.reference import Reference
from relpos_fairseq.conversion.huggingface.to_ours import classes_of, labels_of, task_of, to_ours
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.source import DEFAULTS, Outputs, SourceModel
from relpos_fairseq.conversion.writer import build


def read_source(path: Path) -> SourceModel:
    """Read a checkpoint or a folder.

    Raises:
        ConversionError: it is absent, truncated, or no model that is converted here.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            config = read_json(path / "config.json")
            ours = config.get("model_type") == relpos.KIND
            return _from_relpos(path, config) if ours else _from_huggingface(path)
        files = sorted(path.glob("*.pt"))
        if len(files) != 1:
            raise ConversionError(
                f"{path} has no config.json of a Hugging Face model, and {len(files)} .pt files: "
                f"give the checkpoint itself"
            )
        path = files[0]
    return from_checkpoint(read_checkpoint(path), path)


def _from_relpos(folder: Path, config: dict) -> SourceModel:
    state, values = relpos.state_of(folder), config["values"]
    text = folder / "text"
    source = SourceModel(
        kind=f"{relpos.KIND} of transformers",
        path=folder,
        state=state,
        values=values,
        files=beside(text),
        task=relpos.task_of(config, state),
        labels=labels_of(config, len(config.get("id2label") or ())),
    )
    if not source.files:
        source.notes.append(f"no {text}: the result has no dictionary and no tokenizer")
    check(source)
    source.outputs = lambda tokens, segments: outputs_of(build(values, state), tokens, segments)
    return source


def _from_huggingface(folder: Path) -> SourceModel:
    model = read_folder(folder)
    state, values = to_ours(model)
    source = SourceModel(
        kind=f"Hugging Face's {model.family.name}",
        path=folder,
        state=state,
        values=DEFAULTS | values,
        vocabulary=model.vocabulary,
        files=model.vocabulary.files,
        notes=model.notes,
        task=task_of(model),
        labels=labels_of(model.config, classes_of(model)),
    )
    plan = source.plan
    source.state[layouts.VERSION] = layouts.encode_text(plan.describe())
    source.outputs = lambda tokens, segments: _run_huggingface(model, tokens, segments)
    return source


def _run_huggingface(model: HuggingFaceModel, tokens: Tensor, segments: Tensor | None) -> Outputs:
    rows = torch.tensor(model.vocabulary.rows)
    prefix = model.family.prefix
    types = torch.zeros_like(tokens) if segments is None else segments
    if len(model.encoder("embeddings.token_type_embeddings.weight")) == 1:
        types = torch.zeros_like(tokens)
    found = Reference(model.config, model.weights, prefix).outputs(rows[tokens], tokens == 1, types)
    if "logits" in found:
        logits = found["logits"][..., rows.clamp(min=0)]
        logits[..., rows < 0] = 0
        found["logits"] = logits
    return found


def check_destination(out: Path, source: Path) -> None:
    """Refuse to write over anything, the source above all.

    Raises:
        ConversionError: the destination is the source, lies in it, or exists.
    """
    there, here = out.resolve(), source.resolve()
    if there == here or here in there.parents:
        raise ConversionError(f"--out {out} is or lies in the source {source}: name another place")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"--out {out} exists: remove it, or name another place")
