"""The table and the manifest: what was made, of what, and why lines were dropped."""

from relpos_fairseq.engine.files import Hashes
from relpos_fairseq.engine.manifest import table, write_manifest
from relpos_fairseq.preparation.wmt.clean import DROPPED, add_counts
from relpos_fairseq.preparation.wmt.pipeline import Pipeline


def training_rows(per_corpus: dict[str, dict[str, list[int]]], merged: dict) -> list[list]:
    """Returns the rows from read to kept: what each step takes away and what it leaves.

    Args:
        per_corpus: Each corpus' counts: pairs, source words, target words by reason.
        merged: The counts of the stage merge.
    """
    total: dict[str, list[int]] = {}
    for counts in per_corpus.values():
        add_counts(total, counts)
    left = total.get("read", [0, 0, 0])
    rows = [["read", "", *left]]
    for reason in (*DROPPED, "duplicate"):
        dropped = merged.get(reason) if reason == "duplicate" else total.get(reason)
        if dropped and dropped[0]:
            left = [a - b for a, b in zip(left, dropped, strict=True)]
            rows.append([reason, -dropped[0], *left])
    return rows


def corpus_rows(per_corpus: dict[str, dict[str, list[int]]]) -> list[list]:
    """Returns a row for each corpus: pairs read and kept before duplicates go."""
    zero = [0, 0, 0]
    return [
        [name, counts.get("read", zero)[0], counts.get("kept", zero)[0]]
        for name, counts in per_corpus.items()
    ]


def set_rows(pipeline: Pipeline, stages: dict) -> list[list]:
    """Returns a row for each set: pairs and units."""
    languages = pipeline.settings.languages
    rows = []
    for split in ("train", *pipeline.texts.held_out):
        counts = stages["apply"][split]
        units = (counts[language] for language in languages)
        rows.append([split, pipeline.texts.names.get(split, ""), counts["pairs"], *units])
    return rows


def tables(pipeline: Pipeline, stages: dict) -> str:
    """Returns the tables to print."""
    source, target = pipeline.settings.languages
    cleaned = stages["clean"]
    parts = []
    if len(cleaned) > 1:
        parts.append(table(corpus_rows(cleaned), ["corpus", "pairs read", "pairs kept"]))
    parts.append(
        table(
            training_rows(cleaned, stages["merge"]),
            ["training text", "dropped", "pairs left", f"{source} words", f"{target} words"],
        )
    )
    units = pipeline.settings.bpe
    parts.append(
        table(
            set_rows(pipeline, stages),
            ["in units", "from", "pairs", f"{source} units", f"{target} units"],
        )
    )
    kind = f"{units} {pipeline.settings.model_type}" if units == "sentencepiece" else units
    parts.append(
        f"units: {kind}, {pipeline.settings.vocab_size:,} asked for; "
        f"joined dictionary: {stages['binarise']['dictionary']:,} entries"
    )
    return "\n\n".join(parts)


def write(pipeline: Pipeline, command: list[str], stages: dict, hashes: Hashes) -> None:
    """Writes manifest.json."""
    settings = pipeline.settings
    splits = ["train", *pipeline.texts.held_out]
    outputs = [pipeline.out / "data-bin", pipeline.model, pipeline.sample]
    outputs += [path for split in splits for path in pipeline.units(split)]
    outputs += [path for split in pipeline.texts.held_out for path in pipeline.references(split)]
    write_manifest(
        pipeline.out / "manifest.json",
        command=command,
        inputs=pipeline.texts.paths(),
        outputs=outputs,
        stages=stages,
        extra={
            "settings": settings.cleaning() | settings.units(),
            "sets": pipeline.texts.names,
        },
        hashes=hashes,
    )
