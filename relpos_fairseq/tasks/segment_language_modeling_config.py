"""Flags of the task `segment_language_modeling`."""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from relpos_fairseq.data.streams.text_level import LEVELS

BOUNDARIES = ("sidecar", "eos")


@dataclass
class SegmentLanguageModelingConfig(FairseqDataclass):
    """Flags of the task."""

    data: Optional[str] = field(  # noqa: UP045  (fairseq reads the annotation)
        default=None,
        metadata={"help": "data folder, or several joined by : (one a training epoch)"},
    )
    tokens_per_sample: int = field(
        default=128, metadata={"help": "tokens a row and block (the paper's segment length)"}
    )
    text_level: ChoiceEnum(list(LEVELS)) = field(
        default="auto",
        metadata={
            "help": "what a token is: word, subword (perplexity per word is logged too), char or "
            "byte (bits per character or byte are logged); auto: manifest.json's, else by the "
            "dictionary"
        },
    )
    reset_memory_at_document: bool = field(
        default=False,
        metadata={"help": "what stands before a document's start is invisible after it"},
    )
    document_boundaries: ChoiceEnum(list(BOUNDARIES)) = field(
        default="sidecar",
        metadata={"help": "where documents start: SPLIT.documents.npy, or after every end of line"},
    )
    add_bos_token: bool = field(
        default=False, metadata={"help": "refused: a stream has no sentence starts"}
    )
    max_target_positions: Optional[int] = field(  # noqa: UP045
        default=None, metadata={"help": "longest input of a model with a table of positions"}
    )
    dataset_impl: Any = II("dataset.dataset_impl")
