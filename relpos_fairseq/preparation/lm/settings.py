"""What prepare lm may be asked for: the choices, and what does not go together."""

import argparse

from relpos_fairseq.engine.errors import PreparationError

LEVELS = ("word", "sentencepiece", "char", "byte")
DOCUMENTS = ("none", "blank", "heading")
SPLITS = ("train", "valid", "test")
MODEL_TYPES = ("unigram", "bpe")
COUNTS = ("threshold", "words", "padding_factor", "vocab_size", "sample_lines", "shards", "workers")


def check_values(args: argparse.Namespace, level: str) -> None:
    """Refuse wrong numbers, and what does not go together."""
    for name in COUNTS:
        value, smallest = getattr(args, name), 0 if name == "threshold" else 1
        if value is not None and value < smallest:
            option = name.replace("_", "-")
            raise PreparationError(f"--{option} must be >= {smallest}, got {value}")
    if not 0 < args.character_coverage <= 1:
        raise PreparationError(f"--character-coverage must be in (0, 1], got {args.character_coverage}")
    if level == "byte" and (args.dict or args.words or args.threshold):
        raise PreparationError("at the level of bytes the dictionary is fixed: leave out --dict, --words, --threshold")
    if args.dict and (args.words or args.threshold):
        raise PreparationError("--dict is used as it is: leave out --words and --threshold")
    if args.sentencepiece and level != "sentencepiece":
        raise PreparationError(f"--sentencepiece needs --level sentencepiece, not {level}")
