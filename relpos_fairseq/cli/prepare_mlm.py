#!/usr/bin/env python3
"""Makes a data-bin for fairseq's masked_lm from plain text: tokenizer, blocks, shards.

    python scripts/prepare_mlm.py --out data/wiki --train en=wiki.en.txt.gz de=wiki.de.txt.gz \
        --tokenizer sentencepiece --vocab-size 120000 --alpha 0.7 --tokens-per-sample 512

The same command again continues after an interruption, and does only what has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.files import read_json
from relpos_fairseq.engine.manifest import table, write_manifest
from relpos_fairseq.engine.stages import run_stages
from relpos_fairseq.preparation.mlm.settings import parse
from relpos_fairseq.preparation.mlm.stages import Pipeline


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare.

    Raises:
        ValueError: what is wrong with the input or the command line.
    """
    args = parse(argv)
    pipeline = Pipeline(args)
    counts = run_stages(pipeline.stages(), args.out, force=args.force)
    write_manifest(
        args.out / "manifest.json",
        command=["prepare_mlm.py", *(sys.argv[1:] if argv is None else map(str, argv))],
        inputs={f"{source.name}:{source.path.name}": source.path for source in args.sources},
        outputs=[*pipeline.shards, *([] if args.tokenizer_folder else [pipeline.tokenizer])],
        stages=counts,
        extra={"languages": languages(pipeline)},
    )
    report(pipeline, counts)


def languages(pipeline: Pipeline) -> dict[str, dict[str, float]]:
    """Each language's training sentences and how often its documents occur."""
    from relpos_fairseq.preparation.mlm.sampling import repetitions

    sentences = pipeline.sentences()
    factors = repetitions(sentences, pipeline.args.alpha)
    return {
        language: {"sentences": count, "repetitions": round(factors[language], 4)}
        for language, count in sorted(sentences.items())
    }


def report(pipeline: Pipeline, counts: dict[str, dict]) -> None:
    """Print what was made and how fairseq reads it."""
    args = pipeline.args
    known = read_json(pipeline.counts_file)
    rows = [
        (source.split, source.language, source.path.name, known[source.name].get("documents", 0),
         known[source.name]["sentences"], counts[f"encode-{source.name}"]["tokens"])
        for source in args.sources
    ]  # fmt: skip
    print(table(rows, ("split", "language", "file", "documents", "sentences", "tokens")))
    if len({source.language for source in args.sources}) > 1:
        named = languages(pipeline).items()
        rows = [(name, one["sentences"], one["repetitions"]) for name, one in named]
        print(table(rows, ("language", "training sentences", "repetitions")))
    rows = []
    for shard in pipeline.shards:
        found = counts[f"assemble-{shard.name}"]
        for split in ("train", "valid"):
            if f"{split}_blocks" in found:
                values = [found[f"{split}_{name}"] for name in
                          ("documents", "blocks", "tokens", "split_sentences")]  # fmt: skip
                full = values[2] / values[1] / (args.tokens_per_sample - 1)
                rows.append((f"{shard.name}/{split}", *values, f"{full:.0%}"))
    headers = ("data", "documents", "blocks", "tokens", "sentences cut", "blocks full")
    packed = args.pack != "none"
    print(table(rows if packed else [row[:-1] for row in rows], headers[: None if packed else -1]))
    mode = "eos" if packed else "complete_doc"
    print(
        f"train with: fairseq-train {':'.join(map(str, pipeline.shards))} --task masked_lm "
        f"--sample-break-mode {mode} --tokens-per-sample {args.tokens_per_sample} ..."
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
