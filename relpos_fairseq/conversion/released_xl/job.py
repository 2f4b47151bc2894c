"""The steps of `relpos convert` for a released Transformer-XL."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor, nn

from relpos_fairseq.conversion.job import EXACT, Job, Say, Writer
from relpos_fairseq.conversion.released_xl.model import Released, read_released
from relpos_fairseq.conversion.released_xl.reference import log_probs
from relpos_fairseq.conversion.released_xl.to_ours import state_of, values_of
from relpos_fairseq.conversion.released_xl.vocabulary import read_vocabulary
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.translation.generating import Generating, build
from relpos_fairseq.conversion.vocabulary import Vocabulary
from relpos_fairseq.conversion.writer import load_tensors, write_checkpoint

PROBE = (2, 3, 16)  # rows, segments, tokens of a segment
KIND = "segment_language_modeling"
BUFFERS = ("version", "_float_tensor")


def convert_released(job: Job, path: Path, data: Path | None, say: Say) -> Writer:
    """Convert a released Transformer-XL to one of ours; returns what writes it.

    Raises:
        ConversionError: it cannot be converted, or more is asked for than the same model.
    """
    if job.to != "same" or job.beyond():
        raise ConversionError(
            f"{path} is a released Transformer-XL, which becomes the same model here: give --to "
            f"same and no other option; --finetune-from-model converts the result further"
        )
    released = read_released(path)
    vocabulary = read_vocabulary(data or path.parent, released.types)
    for line in (f"source    released Transformer-XL: {path}", *released.notes):
        say(line)
    values, rows = values_of(released, vocabulary), (len(vocabulary.rows),) * 2
    model = build(KIND, values, rows)
    state = {name: part for name, part in model.state_dict().items() if name.endswith(BUFFERS)}
    load_tensors(model, state | state_of(released, vocabulary), torch.float64)
    difference, size = compare(released, model, vocabulary, job.seed)
    say(f"Maximum difference of log-probabilities: {difference:.3g} (values up to {size:.3g})")
    if not difference <= EXACT * size:  # NaN is no small difference
        raise ConversionError(
            f"{path}: the conversion should be exact, and differs by {difference:.3g}: nothing is "
            f"written; please report this"
        )
    state = model.to(released.state["layers.0.dec_attn.o_net.weight"].dtype).state_dict()
    task = {"tokens_per_sample": values["tokens_per_sample"]}
    loss = "adaptive_loss" if values.get("adaptive_input") else "cross_entropy"
    criterion = {"_name": loss, "sentence_avg": False}
    about = {"source": f"released Transformer-XL: {path.name}", "difference": difference}
    made = Generating(KIND, values, rows, state, task, criterion=criterion)
    return functools.partial(
        write_checkpoint, checkpoint=made.checkpoint(about), about=about, texts={"dict.txt": vocabulary.dictionary()}
    )


@torch.no_grad()
def compare(released: Released, model: nn.Module, vocabulary: Vocabulary, seed: int) -> tuple[float, float]:
    """Return how far log-probabilities are apart on random segments with memory, and their size."""
    rows, count, length = PROBE
    if released.absolute:  # shorter segments would count from another end
        length = released.segment or length
    random = torch.Generator().manual_seed(seed)
    shape = (rows, count * length)
    segments = torch.randint(released.types, shape, generator=random).split(length, 1)
    added = vocabulary.rows.count(-1)
    places = torch.tensor(vocabulary.rows).argsort(stable=True)[added:]
    memory, worst, sizes = None, [], []
    for types, wanted in zip(segments, log_probs(released, list(segments)), strict=True):
        output = model(places[types], memory=memory)
        memory = output[1]["memory"]
        found: Tensor = model.get_normalized_probs(output, log_probs=True)[..., places]
        worst.append((found - wanted).abs().max())
        sizes.append(wanted.abs().max())
    return float(torch.stack(worst).max()), float(torch.stack(sizes).max())
