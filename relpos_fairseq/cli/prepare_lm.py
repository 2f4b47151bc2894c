"""Turns plain text, or WikiText and enwik8, into data that language models train on.

    python scripts/prepare_lm.py --corpus wikitext-103 --out data-bin/wikitext-103
    python scripts/prepare_lm.py --corpus enwik8 --out data-bin/enwik8
    python scripts/prepare_lm.py --text book.txt.gz --split 0.9,0.05,0.05 --level char --out D
    python scripts/prepare_lm.py --train a.txt b.txt --valid v.txt --level sentencepiece --out D

The result is fairseq's: dict.txt, train.bin, train.idx, ... At the levels of words and of
sentencepiece's pieces `</s>` ends every line; at those of characters and bytes `</s>` is the line
feed itself, so that tokens are exactly the text's characters or bytes and bits per token are bits
per character. With --documents, train.documents.npy has the offsets (int64) of the tokens that
documents start with. With --shards N, train is divided over shard0 ... and the printed
`shard0:shard1:...` is what fairseq takes as its data. manifest.json has the counts that
perplexities are divided by, and the hashes of everything.
"""

import sys
from collections.abc import Sequence

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.files import Hashes
from relpos_fairseq.engine.stages import run_stages
from relpos_fairseq.preparation.lm.options import make_parser
from relpos_fairseq.preparation.lm.pipeline import Preparation


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = make_parser(__doc__).parse_args(argv)
    work = Preparation(args)
    work.find_text()
    work.learn_units()
    work.encode()
    hashes = Hashes()
    counts = run_stages(work.stages, work.out, force=args.force, prune=True, hashes=hashes)
    work.report(counts, ["prepare_lm.py", *argv], hashes)
    print(f"data: {':'.join(map(str, work.folders))}")


if __name__ == "__main__":
    sys.exit(run_command(main))
