"""Turn plain text, or WikiText and enwik8, into data that language models train on.

    relpos prepare lm --corpus wikitext-103 --out data-bin/wikitext-103
    relpos prepare lm --corpus enwik8 --out data-bin/enwik8
    relpos prepare lm --text book.txt.gz --split 0.9,0.05,0.05 --level char --out D
    relpos prepare lm --train a.txt b.txt --valid v.txt --level sentencepiece --out D

The result is fairseq's: dict.txt, train.bin, train.idx, ... At the levels of words and of
sentencepiece's pieces `</s>` ends every line; at those of characters and bytes `</s>` is the line
feed itself, so that tokens are exactly the text's characters or bytes and bits per token are bits
per character. With --documents, train.documents.npy has the offsets (int64) of the tokens that
documents start with. With --shards N, train is divided over shard0 ... and the printed
`shard0:shard1:...` is what fairseq takes as its data. manifest.json has the counts that
perplexities are divided by, and the hashes of everything.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.preparation.lm.corpora import CORPORA
from relpos_fairseq.preparation.lm.settings import DOCUMENTS, LEVELS, MODEL_TYPES, SPLITS

HELP = "plain text, WikiText or enwik8, for language models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text(parser)
    add_units(parser)
    add_result(parser)


def add_text(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which text."""
    add = parser.add_argument_group("text (plain, .gz, .bz2 or .xz)").add_argument
    for split in SPLITS:
        add(f"--{split}", nargs="+", type=Path, metavar="FILE", default=[])
    add("--text", nargs="+", type=Path, metavar="FILE", default=[], help="to be split")
    add("--split", metavar="A,B[,C]", help="shares of train, valid, test in --text")
    add("--corpus", choices=sorted(CORPORA))
    add("--downloads", type=Path, metavar="DIR", help="default: OUT/downloads")
    add("--from-dir", type=Path, metavar="DIR", help="has the corpus's archive")
    add("--on-bad-line", choices=("fail", "drop"), default="fail")


def add_units(parser: argparse.ArgumentParser) -> None:
    """Add the options that say into which units it is cut."""
    add = parser.add_argument_group("units").add_argument
    add("--level", choices=LEVELS, help="default: the corpus's own, else word")
    add("--dict", type=Path, metavar="FILE", help="use this dict.txt")
    add("--threshold", type=int, default=0, metavar="N", help="units that occur fewer than N times are unknown")
    add("--words", type=int, metavar="N", help="keep the N most frequent units")
    add("--padding-factor", type=int, default=1, metavar="N")
    add("--sentencepiece", type=Path, metavar="FILE", help="use this model")
    add("--vocab-size", type=int, default=16000, metavar="N")
    add("--model-type", choices=MODEL_TYPES, default="unigram")
    add("--character-coverage", type=float, default=1.0, metavar="P")
    add("--byte-fallback", action="store_true", help="no character is unknown")
    add("--sample-lines", type=int, default=1_000_000, metavar="N", help="lines that sentencepiece learns from")
    add("--seed", type=int, default=1, help="chooses those lines")


def add_result(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is made."""
    add = parser.add_argument_group("result").add_argument
    add("--out", type=Path, required=True, metavar="DIR")
    add(
        "--documents",
        choices=DOCUMENTS,
        default="none",
        help="what starts a document: a line after blank ones, a WikiText title",
    )
    add("--shards", type=int, default=1, metavar="N")
    add("--workers", type=int, default=2, metavar="N")
    add("--force", action="store_true", help="make everything again")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.preparation.lm.stages import LmPreparation

    LmPreparation(args).run(["prepare_lm.py", *argv], args.force)
