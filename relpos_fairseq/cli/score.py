"""Score translations: detokenised BLEU, cased and uncased, and chrF, with sacrebleu's signatures.

    relpos score generated.txt --prepared data/wmt15.en-de
    relpos score generated.txt --baseline other.txt --prepared DIR
    relpos score system.de --reference test.de --language de

A system's file is fairseq-generate's output or plain lines; a sentence that is missing or repeated
is an error. --prepared is the folder that `relpos prepare wmt` wrote: it knows the reference, the
tokenizer and the units. --baseline compares two systems by a paired bootstrap. The papers report
uncased BLEU on newstest2015.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "score translations by BLEU and chrF, and compare two systems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("system", type=Path, help="fairseq-generate's output, or one translation a line")
    add("--baseline", type=Path, help="a second system, to compare with")
    add("--prepared", type=Path, metavar="DIR", help="the folder of `relpos prepare wmt`")
    add("--set", default="test", help="its test set: test, test1, valid (default: test)")
    add("--reference", type=Path, help="plain reference, where there is no --prepared")
    add("--language", help="the target's language, where there is no --prepared")
    add("--tokenizer", choices=("moses", "none"), help="what the system's words were cut by")
    add("--units", choices=("auto", "subword-nmt", "sentencepiece", "none"))
    add("--samples", type=int, default=1000, help="resamples of the bootstrap (default: 1000)")
    add("--seed", type=int, default=12345, help="of the bootstrap (default: sacrebleu's, 12345)")
    add("--json", type=Path, help="write the numbers here as well")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.translation import evaluate, read_prepared, read_reference

    if bool(args.prepared) == bool(args.reference):
        raise ValueError("give either --prepared DIR or --reference FILE")
    if args.samples < 1:
        raise ValueError(f"--samples must be >= 1, got {args.samples}")
    if args.reference:
        target = read_reference(args.reference, args.language, args.tokenizer, args.units)
    else:
        target = read_prepared(args.prepared, args.set, args.tokenizer, args.units)
    evaluate(args.system, target, args.baseline, args.samples, args.seed, args.json)
