"""A small grammar of English and German that speaks each sentence in both languages."""

from .corpus import Corpus, GrammarError, Pair, build, describe, translate, write
from .sampler import Sampler
from .syntax import NP, PP, Clause, Relative, Sentence, clause, np

__all__ = [
    "NP",
    "PP",
    "Clause",
    "Corpus",
    "GrammarError",
    "Pair",
    "Relative",
    "Sampler",
    "Sentence",
    "build",
    "clause",
    "describe",
    "np",
    "translate",
    "write",
]
