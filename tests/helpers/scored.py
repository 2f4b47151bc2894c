"""References, and what fairseq-generate prints of their translations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

REFERENCE = ["Das ist ein Haus.", "Ein Hund, der bellt, beißt nicht!", "Er sagt: „Ja“.", "Ende."] * 5
TOKENS = [
    "Das ist ein Haus .",
    "Ein H@@ und , der b@@ ell@@ t , beißt nicht !",
    "Er sagt : &quot; Ja &quot; .",
    "ende .",
] * 5


def generated(lines: Sequence[str], kinds: str = "HD", numbers: Iterable[int] | None = None) -> str:
    """What fairseq-generate prints: sentences in any order, among other lines."""
    order = list(numbers if numbers is not None else range(len(lines)))
    random.Random(1).shuffle(order)
    out = ["2026-01-01 | INFO | loaded", "S-x"]
    for number in order:
        out += [f"S-{number}\tquelle", f"T-{number}\t{lines[number]}"]
        out += [f"{kind}-{number}\t-0.5\t{lines[number]}" for kind in kinds]
        out.append(f"P-{number}\t-0.1 -0.2")
    return "\n".join([*out, "Generate test with beam=5: BLEU4 = 1.0"]) + "\n"


def write_prepared(folder: Path) -> None:
    """What `score` reads of a folder of `relpos prepare wmt`."""
    (folder / "reference").mkdir(parents=True)
    (folder / "reference" / "test.de").write_text("\n".join(REFERENCE) + "\n")
    settings = {"languages": ["en", "de"], "tokenizer": "moses", "bpe": "subword-nmt"}
    (folder / "manifest.json").write_text(json.dumps({"settings": settings, "sets": {"test": "t"}}))
