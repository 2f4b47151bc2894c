"""SCAN (Lake and Baroni 2018, arXiv:1711.00350): commands to actions, split by the output's length.

The grammar and its interpretation are the paper's, figure 6 and 7:

    C -> S and S | S after S | S        V -> D opposite D' | D around D' | D | U
    S -> V twice | V thrice | V         D -> U left | U right | turn left | turn right
                                        U -> walk | look | run | jump

It is finite: 20,910 commands, outputs of 1 to 48 actions.  The published length split trains on
outputs of at most 22 (16,990 pairs) and tests on 24 to 48 (3,920); Csordas et al. 2021
(arXiv:2108.12284) move the cut-off to 26 and beyond.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from relpos_fairseq.comparison.tasks.base import kind
from relpos_fairseq.comparison.tasks.pairs import Pair, Pairs


def commands() -> dict[str, list[str]]:
    """Return every command and its actions."""
    verbs = {word: [f"I_{word.upper()}"] for word in ("walk", "look", "run", "jump")}
    phrases = dict(verbs)
    for verb, action in {**verbs, "turn": []}.items():
        for side in ("left", "right"):
            turn = [f"I_TURN_{side.upper()}"]
            phrases[f"{verb} {side}"] = turn + action
            phrases[f"{verb} opposite {side}"] = turn * 2 + action
            phrases[f"{verb} around {side}"] = (turn + action) * 4
    repeated = {
        f"{phrase}{word}": actions * times
        for phrase, actions in phrases.items()
        for word, times in (("", 1), (" twice", 2), (" thrice", 3))
    }
    found = dict(repeated)
    for first, before in repeated.items():
        for second, after in repeated.items():
            found[f"{first} and {second}"] = before + after
            found[f"{first} after {second}"] = after + before
    return found


@kind("scan")
@dataclass(frozen=True, kw_only=True)
class Scan(Pairs):
    """SCAN by length."""

    unit: ClassVar[str] = "actions"
    test_sets: ClassVar[tuple[str, ...]] = ("inside", "longer")  # trained lengths, and longer ones

    cutoff: int = 22  # the longest output in training, in actions
    # pairs of training lengths that validate; as many, others, are the set `inside`
    valid: int = 500
    test: int = 0  # longer pairs that are tested, drawn once for all; 0: all of them

    def __post_init__(self) -> None:
        if not 1 <= self.cutoff < 48:
            raise ValueError(f"cutoff must be 1 to 47, the longest output has 48, got {self.cutoff}")
        if self.valid < 1 or self.test < 0:
            raise ValueError(f"valid must be >= 1 and test >= 0, got {self.valid} and {self.test}")

    def pairs(self) -> dict[str, list[Pair]]:
        every = [(command, " ".join(actions)) for command, actions in commands().items()]
        random.Random(1).shuffle(every)
        short = [pair for pair in every if len(pair[1].split()) <= self.cutoff]
        long = [pair for pair in every if len(pair[1].split()) > self.cutoff]
        held = min(self.valid, len(short) // 4)
        return {
            "valid": short[:held],
            "inside": short[held : 2 * held],
            "train": short[2 * held :],
            "longer": long[: self.test or None],
        }
