"""Text to ids and ids to text: the only package that trains, applies or reads tokenizers and subwords.

    tokenizer = train_tokenizer("wordpiece", "out/tokenizer", files=["a.txt.gz"], vocab_size=30000)
    tokenizer = load_tokenizer("out/tokenizer")
    encoding = tokenizer.encode("Café del Mar")
    encoding.pieces, encoding.offsets, encoding.word_begins

Importing this package needs no library of tokenizers, and no fairseq.
"""

from relpos_fairseq.text.dictionary import MASK, SPECIAL
from relpos_fairseq.text.folders import FILES, MODEL_FILES, load_tokenizer
from relpos_fairseq.text.tokenizer import Encoding, Tokenizer
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
