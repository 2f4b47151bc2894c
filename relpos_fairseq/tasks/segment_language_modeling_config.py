"""Flags of the task `segment_language_modeling`."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from relpos_fairseq.config import help_text as _help
from relpos_fairseq.data.streams.text_level import LEVELS

BOUNDARIES = ("sidecar", "eos")


@dataclass
class SegmentLanguageModelingConfig(FairseqDataclass):
    """Flags of the task."""

    data: Optional[str] = _help(  # noqa: UP045  (fairseq reads the annotation)
        None, "data folder, or several joined by : (one a training epoch)"
    )
    tokens_per_sample: int = _help(128, "tokens a row and block (the paper's segment length)")
    text_level: ChoiceEnum(list(LEVELS)) = _help(
        "auto",
        "what a token is: word, subword (perplexity per word is logged too), char or "
        "byte (bits per character or byte are logged); auto: manifest.json's, else by the "
        "dictionary",
    )
    reset_memory_at_document: bool = _help(False, "what stands before a document's start is invisible after it")
    document_boundaries: ChoiceEnum(list(BOUNDARIES)) = _help(
        "sidecar", "where documents start: SPLIT.documents.npy, or after every end of line"
    )
    add_bos_token: bool = _help(False, "refused: a stream has no sentence starts")
    max_target_positions: Optional[int] = _help(  # noqa: UP045
        None, "longest input of a model with a table of positions"
    )
    dataset_impl: Any = II("dataset.dataset_impl")
