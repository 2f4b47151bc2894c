"""The manifest and the tables: what was made, and how fairseq reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relpos_fairseq.engine.files import Hashes, read_json
from relpos_fairseq.engine.manifest import write_manifest
from relpos_fairseq.engine.tables import table
from relpos_fairseq.preparation.mlm.files import MlmFiles
from relpos_fairseq.preparation.mlm.sampling import repetitions
from relpos_fairseq.preparation.unknown import warn_of_unknown

SHARD = ("documents", "blocks", "tokens", "split_sentences")


def languages(files: MlmFiles) -> dict[str, dict[str, float]]:
    """Return each language's training sentences and how often its documents occur."""
    sentences = files.sentences()
    factors = repetitions(sentences, files.args.alpha)
    return {
        language: {"sentences": count, "repetitions": round(factors[language], 4)}
        for language, count in sorted(sentences.items())
    }


def write_report(files: MlmFiles, counts: Mapping[str, Mapping], command: Sequence[str], hashes: Hashes) -> None:
    """Write manifest.json and print what was made."""
    args, found = files.args, languages(files)
    trained = [] if args.tokenizer_folder else [files.tokenizer]
    write_manifest(
        args.out / "manifest.json",
        command=command,
        inputs={f"{source.name}:{source.path.name}": source.path for source in args.sources},
        outputs=[*files.shards, *trained],
        stages=counts,
        extra={"languages": found},
        hashes=hashes,
    )
    rows, headers = file_rows(files, counts)
    print(table(rows, headers))
    warn_of_unknown({row[2]: (row[-1], row[-2]) for row in rows})
    if len({source.language for source in args.sources}) > 1:
        rows = [(name, *one.values()) for name, one in found.items()]
        print(table(rows, ("language", "training sentences", "repetitions")))
    print(table(*shard_rows(files, counts)))
    mode = "complete_doc" if args.pack == "none" else "eos"
    print(
        f"train with: fairseq-train {':'.join(map(str, files.shards))} --task masked_lm "
        f"--sample-break-mode {mode} --tokens-per-sample {args.tokens_per_sample} ..."
    )


def file_rows(files: MlmFiles, counts: Mapping) -> tuple[list[tuple], tuple]:
    """Return a row for each file, and the columns' names."""
    known, rows = read_json(files.counts_file), []
    for source in files.args.sources:
        text, made = known[source.name], counts[f"encode-{source.name}"]
        named = source.split, source.language, source.path.name
        numbers = text.get("documents", 0), text["sentences"], made["tokens"]
        rows.append((*named, *numbers, made.get("unknown", 0)))
    return rows, ("split", "language", "file", "documents", "sentences", "tokens", "unknown")


def shard_rows(files: MlmFiles, counts: Mapping) -> tuple[list[tuple], tuple]:
    """Return a row for each split of each data-bin, and the columns' names."""
    headers = ("data", "documents", "blocks", "tokens", "sentences cut", "blocks full")
    room, packed = files.args.tokens_per_sample - 1, files.args.pack != "none"
    rows = []
    for shard in files.shards:
        found = counts[f"assemble-{shard.name}"]
        for split in ("train", "valid"):
            if f"{split}_blocks" in found:
                values = [found[f"{split}_{name}"] for name in SHARD]
                full = (f"{values[2] / values[1] / room:.0%}",) if packed else ()
                rows.append((f"{shard.name}/{split}", *values, *full))
    return rows, headers if packed else headers[:-1]
