#!/usr/bin/env python
"""Prepares a WMT translation pair, or parallel text of your own, for fairseq: one command.

    python scripts/prepare_wmt.py wmt15 en-de --out data/wmt15.en-de --workers 8
    python scripts/prepare_wmt.py wmt18 en-cs --out data/wmt18.en-cs --czeng ~/czeng16
    python scripts/prepare_wmt.py en-de --from-dir my_text --out data/mine --vocab-size 8000

Downloads (or takes from --from-dir), extracts, normalises, filters, tokenises, learns and applies
subword units and runs fairseq-preprocess. Interrupted at any moment, the same command continues;
run again, it does nothing; what changed is made anew. OUT/data-bin is what fairseq reads,
OUT/manifest.json says what was made of what.
"""

import argparse
import contextlib
import fcntl
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import Hashes, require_space
from relpos_fairseq.engine.lines import ON_BAD_LINE
from relpos_fairseq.engine.manifest import table
from relpos_fairseq.engine.stages import run_stages
from relpos_fairseq.engine.transfer import describe_size
from relpos_fairseq.preparation.wmt import report, shards
from relpos_fairseq.preparation.wmt.filters import Limits
from relpos_fairseq.preparation.wmt.obtain import Plan
from relpos_fairseq.preparation.wmt.pipeline import Pipeline
from relpos_fairseq.preparation.wmt.settings import Settings
from relpos_fairseq.preparation.wmt.sources import DEFAULT_YEAR

COPIES = 4  # of the text in stages: cleaned, tokenised, merged, in units
PACKED = 4  # bytes of text in a byte of a compressed file, about


def parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    whole = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = whole.add_argument
    add("pair", nargs="+", metavar="[YEAR] PAIR", help="wmt15 en-de, wmt15 de-en, wmt18 en-cs, ...")
    add("--out", type=Path, help="folder that takes everything (default: data/YEAR.PAIR)")
    add(
        "--from-dir",
        type=Path,
        metavar="DIR",
        help="use local files: the archives, or train.LANG, valid.LANG, test*.LANG (also .gz)",
    )
    add(
        "--czeng",
        type=Path,
        metavar="DIR",
        help="folder of CzEng 1.6 (its licence forbids fetching)",
    )
    add("--without", nargs="+", default=[], metavar="CORPUS", help="corpora to leave out")
    add("--valid", nargs="+", default=[*Settings.valid], metavar="SET", help="sacrebleu's name")
    add("--test", nargs="+", default=[*Settings.tests], metavar="SET", help="sacrebleu's name")
    add("--sample", type=positive, metavar="N", help="use N training pairs, chosen by --seed")
    add("--seed", type=int, default=Settings.seed)
    add(
        "--workers",
        type=positive,
        default=Settings.workers,
        metavar="N",
        help="processes (default: %(default)s)",
    )
    add(
        "--tokenizer",
        choices=("moses", "none"),
        help="default: moses for subword-nmt, none for sentencepiece",
    )
    add("--bpe", choices=("subword-nmt", "sentencepiece"), default=Settings.bpe)
    add(
        "--model-type",
        choices=("unigram", "bpe"),
        help=f"of sentencepiece (default: {Settings.model_type})",
    )
    add(
        "--vocab-size",
        type=positive,
        default=Settings.vocab_size,
        metavar="N",
        help="merges (subword-nmt) or pieces (sentencepiece), joint (default: %(default)s)",
    )
    add(
        "--learn-lines",
        type=positive,
        default=Settings.learn_lines,
        metavar="N",
        help="pairs that units are learned on, at most (default: %(default)s)",
    )
    add("--max-words", type=positive, default=Limits.max_words, metavar="N")
    add("--max-ratio", type=float, default=Limits.max_ratio, metavar="R")
    add(
        "--on-bad-line",
        choices=ON_BAD_LINE,
        default=Settings.on_bad_line,
        help="invalid UTF-8 in training text: stop, or drop the pair and count it",
    )
    add(
        "--shard",
        type=shard,
        metavar="I/N",
        help="only clean and tokenise part I of N of the training text",
    )
    add("--merge", type=positive, metavar="N", help="join N shards and do the rest")
    add("--force", action="store_true", help="run every stage again")
    add("--dry-run", action="store_true", help="print sources, sizes and disk needed; do nothing")
    return whole  # fmt: skip


def positive(text: str) -> int:
    """Reads a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return number


def shard(text: str) -> tuple[int, int]:
    """Reads I/N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text}")
    return int(number), int(count)


def read_settings(args: argparse.Namespace) -> Settings:
    """Checks the command line.

    Raises:
        PreparationError: Options that do not go together, or a pair that is none.
    """
    *years, pair = args.pair
    languages = pair.split("-")
    if len(languages) != 2 or not all(languages) or len(set(languages)) != 2 or len(years) > 1:
        raise PreparationError(f"give [YEAR] PAIR, as in wmt15 en-de; got {' '.join(args.pair)}")
    if args.shard and args.merge:
        raise PreparationError("--shard makes one part, --merge joins all: give one of them")
    if args.model_type and args.bpe != "sentencepiece":
        raise PreparationError(
            f"--model-type {args.model_type} goes with --bpe sentencepiece, not with {args.bpe}"
        )
    if not args.max_ratio >= 1:  # nan is not
        raise PreparationError(f"--max-ratio must be >= 1, got {args.max_ratio}")
    other = languages[1] if languages[0] == "en" else languages[0]
    year = years[0] if years else ("" if args.from_dir else DEFAULT_YEAR.get(other, ""))
    if not year and not args.from_dir:
        raise PreparationError(f"no training set is known for {pair}: give yours with --from-dir")
    return Settings(
        year=year,
        source=languages[0],
        target=languages[1],
        out=args.out or Path("data", ".".join(filter(None, (year, pair)))),
        from_dir=args.from_dir,
        czeng=args.czeng,
        without=tuple(args.without),
        valid=tuple(args.valid),
        tests=tuple(args.test),
        sample=args.sample,
        seed=args.seed,
        tokenizer=args.tokenizer or ("moses" if args.bpe == "subword-nmt" else "none"),
        bpe=args.bpe,
        model_type=args.model_type or Settings.model_type,
        vocab_size=args.vocab_size,
        learn_lines=args.learn_lines,
        limits=Limits(max_words=args.max_words, max_ratio=args.max_ratio),
        on_bad_line=args.on_bad_line,
        workers=args.workers,
        shards=args.shard[1] if args.shard else args.merge or 1,
        shard=args.shard[0] if args.shard else None,
    )


def describe(plan: Plan) -> tuple[str, int]:
    """Returns a table of what is read, and the bytes of disk that the whole needs."""
    rows, archives, text = [], 0, 0
    for source in plan.sources():
        archives += source.size or 0
        known = "sha256" if source.sha256 else "sacrebleu's md5"
        rows.append(
            [source.name, describe_size(source.size), known, source.urls[0], source.licence]
        )
    text += sum(corpus.expanded for corpus in plan.corpora)
    for path in plan.texts.paths():
        # What archives expand to is counted already, whether or not it is there by now.
        if path.exists() and not path.is_relative_to(plan.settings.out / "raw"):
            size = path.stat().st_size
            text += size * (PACKED if path.suffix in (".gz", ".bz2", ".xz") else 1)
            rows.append([path.name, describe_size(size), "", str(path), ""])
    if plan.settings.from_dir:
        archives = 0
    headers = ["source", "size", "checked by", "from", "licence"]
    return table(rows, headers), archives + text * (COPIES + 1)


def written(folder: Path) -> int:
    """Returns the bytes below a folder; other shards' temporary files may vanish meanwhile."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits for other shards that download or extract in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".shards.lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def prepare(settings: Settings, plan: Plan, command: list[str], force: bool) -> None:
    """Runs the stages that are asked for."""
    pipeline = Pipeline(settings, plan.texts)
    out, hashes = settings.out, Hashes()
    run = functools.partial(run_stages, force=force, hashes=hashes)
    with alone(out):
        stages = run([*plan.stages(), *pipeline.first_stages()], out)
    pipeline.counts = stages["count"]
    if settings.shard is not None or settings.shards == 1:
        number = settings.shard or 1
        made = run(pipeline.shard_stages(number), pipeline.shard_folder(number))
        if settings.shard is not None:
            shards.write(pipeline, number, command, made, hashes)
            print(f"shard {number} of {settings.shards} is ready; join all with "
                  f"--merge {settings.shards}", flush=True)  # fmt: skip
            return
    else:
        made = shards.read(pipeline, hashes)
    stages |= made | run(pipeline.last_stages(), out)
    report.write(pipeline, command, stages, hashes)
    print(f"\n{report.tables(pipeline, stages)}\n\n{out / 'data-bin'} is what fairseq reads; "
          f"{out / 'manifest.json'} says how it was made", flush=True)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    settings = read_settings(args)
    settings = replace(settings, out=settings.out.absolute())
    if "," in str(settings.out):
        raise PreparationError(
            f"--out must have no comma, at which fairseq-preprocess ends a path; got {settings.out}"
        )
    plan = Plan(settings)
    described, needed = describe(plan)
    print(
        f"{described}\n\ndisk needed in {settings.out}: about {describe_size(needed)}", flush=True
    )
    if plan.lacks_czeng():
        print("without CzEng, which the papers train on: name its folder with --czeng", flush=True)
    if args.dry_run:
        return
    if not (settings.out / "manifest.json").exists():
        require_space(settings.out, max(0, needed - written(settings.out)))
    prepare(settings, plan, ["prepare_wmt.py", *argv], args.force)


if __name__ == "__main__":
    sys.exit(run_command(main))
