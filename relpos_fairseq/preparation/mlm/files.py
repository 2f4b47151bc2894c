"""The names of all files that a preparation makes, and the counts in one of them."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path

from relpos_fairseq.engine.files import read_json
from relpos_fairseq.preparation.mlm.settings import TextFile


class MlmFiles:
    """Where the stages put what they make.

    Args:
        args: the command line, checked.

    Attributes:
        work: folder of what is only needed on the way.
        tokenizer: folder of the tokenizer.
        shards: the data-bins.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.work = args.out / "work"
        self.counts_file = self.work / "counts.json"
        self.text = self.work / "tokenizer.txt"
        self.tokenizer = args.tokenizer_folder or args.out / "tokenizer"
        data = args.out / "data-bin"
        several = args.shards > 1
        self.shards = [data / f"shard{n}" for n in range(args.shards)] if several else [data]

    def encoded(self, source: TextFile) -> list[Path]:
        """Return the encoded text of a file and its index."""
        return [self.work / f"{source.name}{ending}" for ending in (".bin", ".idx")]

    def sentences(self) -> dict[str, int]:
        """Training sentences of every language."""
        counts, totals = read_json(self.counts_file), Counter()
        for source in self.args.sources:
            if source.split == "train":
                totals[source.language] += counts[source.name]["sentences"]
        return dict(totals)
