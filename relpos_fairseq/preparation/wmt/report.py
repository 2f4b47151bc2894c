"""The table and the manifest: what was made, of what, and why lines were dropped."""

from collections.abc import Sequence

from relpos_fairseq.engine.files import Hashes, describe_size
from relpos_fairseq.engine.lines import COMPRESSED
from relpos_fairseq.engine.manifest import write_manifest
from relpos_fairseq.engine.tables import table
from relpos_fairseq.preparation.unknown import warn_of_unknown
from relpos_fairseq.preparation.wmt.clean import DROPPED, add_counts
from relpos_fairseq.preparation.wmt.files import WmtFiles
from relpos_fairseq.preparation.wmt.local import Texts
from relpos_fairseq.preparation.wmt.obtain import RawText
from relpos_fairseq.preparation.wmt.settings import WmtSettings

COPIES = 4  # of the text in stages: cleaned, tokenised, merged, in units
PACKED = 4  # bytes of text in a byte of a compressed file, about


def training_rows(per_corpus: dict[str, dict[str, list[int]]], merged: dict) -> list[list]:
    """Return the rows from read to kept: what each step takes away and what it leaves.

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


def reasons(stamps: Sequence[dict | None]) -> str:
    """Say in a line how many pairs the stages `clean` read and why they dropped them."""
    total: dict[str, list[int]] = {}
    for stamp in stamps:
        for counts in (stamp or {}).get("counts", {}).values():
            add_counts(total, counts)
    named = ((reason, total[reason][0]) for reason in ("read", *DROPPED) if reason in total)
    return ", ".join(f"{reason} {count:,}" for reason, count in named if count)


def corpus_rows(per_corpus: dict[str, dict[str, list[int]]]) -> list[list]:
    """Return a row for each corpus: pairs read and kept before duplicates go."""
    zero = [0, 0, 0]
    return [[name, counts.get("read", zero)[0], counts.get("kept", zero)[0]] for name, counts in per_corpus.items()]


def set_rows(settings: WmtSettings, texts: Texts, stages: dict) -> list[list]:
    """Return a row for each set: pairs, and of both languages units and unknown ones."""
    languages = settings.languages
    rows = []
    for split in ("train", *texts.held_out):
        counts = stages["apply"][split]
        unknown = stages["binarise"].get("unknown", {}).get(split, {})
        numbers = (n for one in languages for n in (counts[one], unknown.get(one, 0)))
        rows.append([split, texts.names.get(split, ""), counts["pairs"], *numbers])
    return rows


def tables(settings: WmtSettings, texts: Texts, stages: dict) -> str:
    """Return the tables to print."""
    source, target = settings.languages
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
    units = settings.bpe
    heads = [head for one in settings.languages for head in (f"{one} units", "unknown")]
    parts.append(table(set_rows(settings, texts, stages), ["in units", "from", "pairs", *heads]))
    kind = f"{units} {settings.model_type}" if units == "sentencepiece" else units
    parts.append(
        f"units: {kind}, {settings.vocab_size:,} asked for; "
        f"joined dictionary: {stages['binarise']['dictionary']:,} entries"
    )
    return "\n\n".join(parts)


def write(files: WmtFiles, texts: Texts, command: Sequence[str], stages: dict, hashes: Hashes) -> None:
    """Write manifest.json and print the tables."""
    settings, out = files.settings, files.out
    stages |= stages.pop("shards", {})
    held_out = texts.held_out
    outputs = [out / "data-bin", files.model, files.sample]
    outputs += [path for split in ("train", *held_out) for path in files.units(split)]
    outputs += [path for split in held_out for path in files.references(split)]
    manifest = out / "manifest.json"
    write_manifest(
        manifest,
        command=command,
        inputs=texts.paths(),
        outputs=outputs,
        stages=stages,
        extra={"settings": settings.cleaning() | settings.units(), "sets": texts.names},
        hashes=hashes,
    )
    print(
        f"\n{tables(settings, texts, stages)}\n\n{out / 'data-bin'} is what fairseq reads; "
        f"{manifest} says how it was made",
        flush=True,
    )
    for row in set_rows(settings, texts, stages):
        pairs = zip(settings.languages, (row[4::2]), row[3::2], strict=True)
        warn_of_unknown({f"{row[0]}.{one}": (unknown, units) for one, unknown, units in pairs})


def describe(raw: RawText) -> tuple[str, int]:
    """Return a table of what will be read, and the bytes of disk that the whole needs."""
    rows, archives, text = [], 0, 0
    for archive in raw.archives():
        archives += archive.size or 0
        known = "sha256" if archive.sha256 else "sacrebleu's md5"
        size = describe_size(archive.size)
        rows.append([archive.name, size, known, archive.urls[0], archive.licence])
    text += sum(corpus.expanded for corpus in raw.corpora)
    for path in raw.texts.paths():
        # What archives expand to is counted already, whether or not it is there by now.
        if path.exists() and not path.is_relative_to(raw.settings.out / "raw"):
            size = path.stat().st_size
            text += size * (PACKED if path.suffix in COMPRESSED[1:] else 1)
            rows.append([path.name, describe_size(size), "", str(path), ""])
    if raw.settings.from_dir:
        archives = 0
    headers = ["source", "size", "checked by", "from", "licence"]
    return table(rows, headers), archives + text * (COPIES + 1)
