"""Join pairs of STS-B to long ones: texts of several sentences, and the mean of their similarities.

    python examples/comparison/joined.py glue_data data/joined_raw          # GLUE's own layout, for relpos prepare glue

A sentence's partner stands in the other text as far back as all between them is long, which takes a model that was
trained on single pairs beyond its lengths. Every pair of the source occurs three times; draws are the same everywhere.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.lines import COMPRESSED, read_lines

PAIRS = 10  # of sentences in one of texts: 300 tokens or so
TIMES = 3  # that each is drawn
COLUMNS = ("index", "sentence1", "sentence2", "score")


def join(source: Path, target: Path) -> None:
    """Write a set of joined pairs from a set of GLUE's STS-B."""
    rows = list(csv.DictReader(read_lines(source), delimiter="\t", quoting=csv.QUOTE_NONE))
    draw, order, lines = random.Random(1), [], ["\t".join(COLUMNS)]
    for _ in range(TIMES):
        order += draw.sample(rows, len(rows))
    for number in range(len(order) // PAIRS):
        some = order[number * PAIRS : (number + 1) * PAIRS]
        texts = [" ".join(row[column] for row in some) for column in COLUMNS[1:3]]
        lines.append("\t".join([str(number), *texts, f"{sum(float(row['score']) for row in some) / PAIRS:.4f}"]))
    write_text(target, "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    given, out = map(Path, sys.argv[1:])
    (out / "STS-B").mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev"):
        found = (given / "STS-B" / f"{split}.tsv{ending}" for ending in COMPRESSED)
        join(next(path for path in found if path.is_file()), out / "STS-B" / f"{split}.tsv")
