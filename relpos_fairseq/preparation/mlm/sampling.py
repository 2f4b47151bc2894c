"""How often each language is seen: shares raised to an exponent.

With n_l sentences of language l and p_l = n_l / Σ n, languages are drawn by q_l = p_l^α / Σ p^α
(Conneau and Lample 2019, section 3.1; mBERT: α = 0.7). Here nothing is drawn: a document of
language l occurs q_l / p_l times, scaled so that the language with the most sentences occurs once.
So no text is left out, rare languages repeat, and a document's own hash decides a fractional part.
"""

from __future__ import annotations

import hashlib

import numpy as np

from relpos_fairseq.engine.errors import PreparationError


def shares(sentences: dict[str, int], alpha: float) -> dict[str, float]:
    """q_l of every language, from its number of sentences.

    `alpha` is the exponent: 1 keeps the shares, 0 makes them equal.
    """
    if not 0 <= alpha <= 1:
        raise PreparationError(f"--alpha must be from 0 to 1, got {alpha}")
    empty = [language for language, count in sentences.items() if count < 1]
    if empty or not sentences:
        raise PreparationError(f"there is no text in language {(empty or ['(none)'])[0]!r}")
    total = sum(sentences.values())
    weights = {language: (count / total) ** alpha for language, count in sentences.items()}
    return {language: weight / sum(weights.values()) for language, weight in weights.items()}


def repetitions(sentences: dict[str, int], alpha: float) -> dict[str, float]:
    """How often a document of each language occurs; 1 for the largest language."""
    wanted = shares(sentences, alpha)
    factors = {language: wanted[language] / count for language, count in sentences.items()}
    least = min(factors.values())
    return {language: factor / least for language, factor in factors.items()}


def uniform(seed: int, stream: str, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) (N,) that depend on the arguments alone, one an index (N,).

    SplitMix64's finaliser (Steele et al. 2014) over the index, a hash of the stream's name (what
    the numbers are for) and the seed: any subset can be asked for, in any process.
    """
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    start = np.uint64(int.from_bytes(digest, "little"))
    with np.errstate(over="ignore"):
        z = start + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) / 2.0**53


def copies(factor: float, chance: np.ndarray) -> np.ndarray:
    """How often each document occurs (N,): a factor, rounded up with its fraction's probability."""
    whole = int(factor)
    return whole + (chance < factor - whole).astype(np.int64)
