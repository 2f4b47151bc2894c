"""Packs sentences into blocks: full sentences, document boundaries kept.

A block has at most `tokens - 1` tokens, as fairseq puts <s> in front; </s> ends every sentence.

- `document`: no block has two documents (RoBERTa's DOC-SENTENCES; Chen et al. 2021, section 4:
  full sentences from documents, packed up to the maximum length).
- `full`: blocks run on over the end of a document, with one more </s> there (RoBERTa's
  FULL-SENTENCES).

Read with `--sample-break-mode eos`. Not packed (`none`), an item is a sentence and an item of </s>
alone ends a document: fairseq's `--sample-break-mode complete_doc` packs it on loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.preparation.mlm.settings import LEAST_TOKENS, PACKING


def document_spans(sizes: np.ndarray) -> np.ndarray:
    """First and past-the-last sentence of every document (D, 2), without the item that ends it.

    `sizes` are the (N,) tokens of each item; an item of one token ends a document; empty documents
    are left out.
    """
    ends = np.flatnonzero(sizes == 1)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    spans = np.stack([starts, ends], axis=1)
    return spans[spans[:, 0] < spans[:, 1]]


def pack(
    documents: Iterable[list[np.ndarray]], mode: str, tokens: int, eos: int, counts: Counter | None = None
) -> Iterator[np.ndarray]:
    """The items of a data set, (L,) tokens each, 1 <= L < tokens where packed.

    Args:
        documents: each the list of its sentences' tokens, every sentence ending with `eos`.
        mode: `document`, `full` or `none`.
        tokens: tokens of a block with <s>.
        eos: the token that ends a sentence.
        counts: counts `blocks`, `tokens`, and `split_sentences` (longer than a block).
    """
    counts = Counter() if counts is None else counts
    if mode not in PACKING:
        raise PreparationError(f"--pack must be one of {', '.join(PACKING)}, got {mode!r}")
    if tokens < LEAST_TOKENS:
        raise PreparationError(f"--tokens-per-sample must be at least {LEAST_TOKENS}, got {tokens}")
    end = np.array([eos])
    if mode == "none":
        items = (item for document in documents for item in (*document, end))
    elif mode == "document":
        items = (block for document in documents for block in _blocks(document, tokens - 1, counts))
    else:
        items = _blocks(_run_on(documents, end), tokens - 1, counts)
    for item in items:
        counts["blocks"] += 1
        counts["tokens"] += len(item)
        yield item


def _run_on(documents: Iterable[list[np.ndarray]], end: np.ndarray) -> Iterator[np.ndarray]:
    """Sentences of all documents, each document's last with one more end."""
    for document in documents:
        yield from document[:-1]
        yield np.concatenate([document[-1], end])


def _blocks(sentences: Iterable[np.ndarray], room: int, counts: Counter) -> Iterator[np.ndarray]:
    """Fill blocks with whole sentences in their order; a sentence without room begins the next.

    A sentence longer than a block is cut into whole blocks; what is left of it begins the next.
    """
    block, used = [], 0
    for sentence in sentences:
        if len(sentence) > room - used and block:
            yield np.concatenate(block)
            block, used = [], 0
        if len(sentence) > room:
            counts["split_sentences"] += 1
            while len(sentence) > room:
                yield sentence[:room]
                sentence = sentence[room:]
        block.append(sentence)
        used += len(sentence)
    if block:
        yield np.concatenate(block)
