"""What prepare qa may be asked for, and what does not go together."""

import argparse

from relpos_fairseq.data.question_answering.reading import split_name
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.preparation.mlm.vocabulary import tokenizer_files

VOCABULARY_SIZE = 8000


def check(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if bool(args.tokenizer) == bool(args.train_tokenizer):
        raise PreparationError("give either --tokenizer FOLDER or --train-tokenizer KIND")
    if args.tokenizer and (args.lowercase or args.vocab_size is not None):
        option = "lowercase" if args.lowercase else "vocab-size"
        raise PreparationError(f"--{option} needs --train-tokenizer: --tokenizer is taken as it is")
    if bool(args.valid) == (args.train_articles is not None):
        raise PreparationError("give either --valid FILES or --train-articles N")
    if args.train_articles is not None and args.train_articles < 1:
        raise PreparationError(f"--train-articles must be 1 or more, got {args.train_articles}")
    if args.tokenizer and not (args.tokenizer / "dict.txt").is_file():
        raise PreparationError(
            f"no {args.tokenizer / 'dict.txt'}: put the dictionary of the model that will be "
            f"fine-tuned beside its tokenizer"
        )
    made = tokenizer_names(args)
    if foreign := [path.name for path in tokenizer_files(args.out) if path.name not in made]:
        raise PreparationError(  # the task would read them
            f"--out {args.out} holds another tokenizer's {', '.join(foreign)}: remove it, or choose another folder"
        )
    names = [split_name(path) for path in args.eval]
    twice = {name for name in names if names.count(name) > 1 or name in ("train", "valid")}
    if twice:
        raise PreparationError(f"--eval: {', '.join(sorted(twice))} would be written twice: rename the files")


def tokenizer_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the tokenizer's files that will be copied or trained."""
    if args.tokenizer:
        return [path.name for path in tokenizer_files(args.tokenizer)]
    pieces = args.train_tokenizer == "sentencepiece"
    return ["sentencepiece.model" if pieces else "tokenizer.json", "dict.txt"]
