"""Subword tokenizers with exact character offsets, behind one interface.

    tokenizer = train_tokenizer("wordpiece", "out/tokenizer", files=["a.txt.gz"], vocab_size=30000)
    tokenizer = load_tokenizer("out/tokenizer")
    encoding = tokenizer.encode("Café del Mar")
    encoding.pieces, encoding.offsets, encoding.word_begins

Byte-level BPE and WordPiece run in the `tokenizers` library, sentencepiece in its own.  Importing
this package needs neither of them, and no fairseq.
"""

from relpos_fairseq.text.tokenizer import FILES, MASK, MODEL_FILES, SPECIAL, Encoding, Tokenizer, load_tokenizer
from relpos_fairseq.text.training import KINDS, train_tokenizer

__all__ = [
    "FILES",
    "KINDS",
    "MASK",
    "MODEL_FILES",
    "SPECIAL",
    "Encoding",
    "Tokenizer",
    "load_tokenizer",
    "train_tokenizer",
]
