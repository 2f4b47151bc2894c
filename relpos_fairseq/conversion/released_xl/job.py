"""The steps of `relpos convert` for a released Transformer-XL."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from omegaconf import OmegaConf
from torch import Tensor, nn

from relpos_fairseq.conversion.job import EXACT, Job
from relpos_fairseq.conversion.released_xl.model import Released, read_released
from relpos_fairseq.conversion.released_xl.reference import log_probs
from relpos_fairseq.conversion.released_xl.to_ours import State, state_of, values_of
from relpos_fairseq.conversion.released_xl.vocabulary import Vocabulary, read_vocabulary
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.writer import CHECKPOINT, Rows, config_of, fairseq_checkpoint
from relpos_fairseq.models.config.transformer_xl import RelPosTransformerXLConfig
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.tasks.segment_language_modeling_config import SegmentLanguageModelingConfig

PROBE = (2, 3, 16)  # rows, segments, tokens of a segment
TASK = "segment_language_modeling"
BUFFERS = ("version", "_float_tensor")


def convert_released(
    job: Job, path: Path, data: Path | None, say: Callable[[str], object]
) -> Callable[[Path], None]:
    """Convert a released Transformer-XL to one of ours; returns what writes it.

    Raises:
        ConversionError: it cannot be converted, or more is asked for than the same model.
    """
    asked = [name for name, value in job.given.items() if value is not None]
    asked += ["fill"] if job.fill else ["head"] if job.head else []
    if job.to != "same" or asked or job.approximate or job.init != "neutral":
        raise ConversionError(
            f"{path} is a released Transformer-XL, which becomes the same model here: give --to "
            f"same and no other option; --finetune-from-model converts the result further"
        )
    released = read_released(path)
    vocabulary = read_vocabulary(data or path.parent, released.types)
    for line in (f"source    released Transformer-XL: {path}", *released.notes):
        say(line)
    values = values_of(released, vocabulary)
    model = build(values, state_of(released, vocabulary), len(vocabulary.rows))
    difference, size = compare(released, model, vocabulary, job.seed)
    say(f"Maximum difference of log-probabilities: {difference:.3g} (values up to {size:.3g})")
    if not difference <= EXACT * size:  # NaN is no small difference
        raise ConversionError(
            f"{path}: the conversion should be exact, and differs by {difference:.3g}: nothing is "
            f"written; please report this"
        )
    dtype = released.state["layers.0.dec_attn.o_net.weight"].dtype
    about = {"source": f"released Transformer-XL: {path.name}", "difference": difference}
    checkpoint = checkpoint_of(values, model.to(dtype).state_dict(), about)

    def write(out: Path) -> None:
        if not out.is_dir():
            torch.save(checkpoint, out)
            return
        torch.save(checkpoint, out / CHECKPOINT)
        (out / "dict.txt").write_text(vocabulary.dictionary(), encoding="utf-8")
        text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
        (out / "conversion.json").write_text(text, encoding="utf-8")

    return write


def build(values: dict[str, Any], state: State, rows: int) -> nn.Module:
    """Build a relpos_transformer_xl of config values and tensors, in fp64 and evaluation mode.

    Raises:
        ConversionError: tensors are missing, unknown, or of another shape.
    """
    config = RelPosTransformerXLConfig()
    for name, value in values.items():
        setattr(config, name, value)
    words = Rows(rows)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = RelPosTransformerXLModel.build_model(config, task).double().eval()
    own = {name: value for name, value in model.state_dict().items() if name.endswith(BUFFERS)}
    try:
        model.load_state_dict(own | state)
    except (RuntimeError, ValueError) as error:
        raise ConversionError(f"the tensors do not fit: {error}") from None
    return model


@torch.no_grad()
def compare(
    released: Released, model: nn.Module, vocabulary: Vocabulary, seed: int
) -> tuple[float, float]:
    """Return how far log-probabilities are apart on random segments with memory, and their size."""
    rows, count, length = PROBE
    if released.absolute:  # shorter segments would count from another end
        length = released.segment or length
    random = torch.Generator().manual_seed(seed)
    shape = (rows, count * length)
    segments = torch.randint(released.types, shape, generator=random).split(length, 1)
    places = torch.tensor(vocabulary.rows).argsort(stable=True)[vocabulary.added :]
    memory, worst, sizes = None, [], []
    for types, wanted in zip(segments, log_probs(released, list(segments)), strict=True):
        output = model(places[types], memory=memory)
        memory = output[1]["memory"]
        found: Tensor = model.get_normalized_probs(output, log_probs=True)[..., places]
        worst.append((found - wanted).abs().max())
        sizes.append(wanted.abs().max())
    return float(torch.stack(worst).max()), float(torch.stack(sizes).max())


def checkpoint_of(values: dict[str, Any], state: State, about: dict[str, Any]) -> dict[str, Any]:
    """Return a fairseq checkpoint that every tool of fairseq's loads."""
    known = {part.name for part in fields(RelPosTransformerXLConfig)}
    own = {name: value for name, value in values.items() if name in known}
    model = OmegaConf.merge(RelPosTransformerXLConfig(), own)
    own = {"tokens_per_sample": values["tokens_per_sample"], "data": "."}
    task = OmegaConf.merge(SegmentLanguageModelingConfig(), own)
    model._name, task._name = "relpos_transformer_xl", TASK
    name = "adaptive_loss" if values.get("adaptive_input") else "cross_entropy"
    criterion = OmegaConf.merge({"_name": name}, CrossEntropyCriterionConfig())
    return fairseq_checkpoint(
        config_of(model, task, criterion), state, about, "CrossEntropyCriterion"
    )
