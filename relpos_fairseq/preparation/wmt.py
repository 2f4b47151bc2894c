"""Prepare parallel text for translation: from raw text to what fairseq reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import (
    Hashes,
    bytes_below,
    describe_size,
    open_together,
    read_json,
    require_space,
    write_json,
)
from relpos_fairseq.io.lines import COMPRESSED, read_lines
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import STAMPS, Stage, describe_files, labelled, read_stamp, versions, write_manifest
from relpos_fairseq.preparation.binarise import count_unknown, preprocess, warn_of_unknown
from relpos_fairseq.preparation.cleaning import DROPPED, Cleaner, Filter, add_counts, clean_shard, drop_duplicates
from relpos_fairseq.preparation.parallel_text import LONGEST_SIDE, RawText, Texts
from relpos_fairseq.preparation.pipeline import Preparation
from relpos_fairseq.preparation.settings import SUBWORD_NMT, WmtSettings
from relpos_fairseq.preparation.subwords import apply_to_files, write_sample
from relpos_fairseq.text.dictionary import NSPECIAL
from relpos_fairseq.text.moses import FastMoses, Normaliser
from relpos_fairseq.text.tokenizer import load_subwords
from relpos_fairseq.text.training import learn_sentencepiece, learn_subword_nmt

# ---- The names of all files that a preparation makes.


class WmtFiles:
    """Where the stages put what they make.

    Args:
        settings: What is asked for.

    Attributes:
        pairs: The number of pairs of every text.
        folded: Sentences of validation and test sets, which are not trained on.
        train: The training text of both languages before it is cut into units.
        model: The units that were learned.
        sample: What they were learned on.
    """

    def __init__(self, settings: WmtSettings) -> None:
        self.settings, self.out = settings, settings.out
        self.pairs = self.out / "shards" / "pairs.json"
        self.folded = self.out / "text" / "held-out.txt"
        self.train = settings.sides(self.out / "text", "train")
        name = "bpe.codes" if settings.bpe == SUBWORD_NMT else "sentencepiece.model"
        self.model = self.out / "units" / name
        self.sample = self.out / "units" / "sample.txt"

    @property
    def tokenises(self) -> bool:
        """Whether words are cut from punctuation before units are learned."""
        return self.settings.tokenizer == "moses"

    def held_out(self, split: str) -> tuple[Path, Path]:
        """Return the files of a validation or test set, ready for units."""
        return self.settings.sides(self.out / "text", split)

    def references(self, split: str) -> tuple[Path, Path]:
        """Return the files of a held-out set as they were, which translations are scored on."""
        return self.settings.sides(self.out / "reference", split)

    def units(self, split: str) -> tuple[Path, Path]:
        """Return the files of a set in units."""
        return self.settings.sides(self.out / "units", split)

    def shard_folder(self, shard: int) -> Path:
        """Return the folder of a shard."""
        return self.out / "shards" / f"{shard}-of-{self.settings.shards}"

    def cleaned(self, shard: int) -> list[Path]:
        """Return a shard's source lines, target lines and records."""
        folder = self.shard_folder(shard)
        return [*self.settings.sides(folder, "clean"), folder / "clean.records"]

    def ready(self, shard: int) -> tuple[Path, Path]:
        """Return a shard's lines as units are learned on them."""
        name = "tokens" if self.tokenises else "clean"
        return self.settings.sides(self.shard_folder(shard), name)


# ---- What a shard leaves for the run that joins all of them.


MANIFEST = "manifest.json"
SHARD_STAGES = ("clean", "tokenise")  # of a shard


def write_shard_manifest(files: WmtFiles, texts: Texts, command: Sequence[str], counts: dict, hashes: Hashes) -> None:
    """Write a shard's manifest."""
    settings = files.settings
    shard = settings.shard
    write_manifest(
        files.shard_folder(shard) / MANIFEST,
        command=command,
        inputs=texts.paths(),
        outputs=shard_outputs(files, shard),
        stages={name: counts[name] for name in SHARD_STAGES if name in counts},
        extra={"settings": settings.cleaning(), "shard": [shard, settings.shards]},
        hashes=hashes,
    )
    print(f"shard {shard} of {settings.shards} is ready; join all with --merge {settings.shards}", flush=True)


def shards_stage(files: WmtFiles, texts: Texts, hashes: Hashes) -> Stage:
    """Return the stage that checks the shards; its counts are the sum of theirs, by stage."""
    settings = files.settings
    shards = range(1, settings.shards + 1)
    made = [files.shard_folder(shard) / MANIFEST for shard in shards]
    made += [path for shard in shards for path in shard_outputs(files, shard)]
    there = [path for path in made if path.is_file()]
    asked = settings.cleaning() | {"shards": settings.shards}
    return Stage("shards", lambda: read_shards(files, texts, hashes), [*texts.paths(), *there], [], asked)


def read_shards(files: WmtFiles, texts: Texts, hashes: Hashes) -> dict[str, dict]:
    """Return the sum of all shards' counts, by stage.

    Raises:
        UserError: A shard is missing, was made with other settings, by other versions or of
            other text, or was changed or left unfinished since.
    """
    settings = files.settings
    wanted = {**settings.cleaning(), "languages": [*settings.languages]}
    total: dict[str, dict] = {"clean": {}}
    inputs = describe_files(labelled(texts.paths(), None), hashes)
    for shard in range(1, settings.shards + 1):
        path = files.shard_folder(shard) / MANIFEST
        manifest = read_json(path)
        option = f"--shard {shard}/{settings.shards}"
        if manifest is None:
            raise UserError(f"{path} is missing: run with {option} first")
        for key, value in wanted.items():
            if manifest["settings"].get(key) != value:
                raise UserError(
                    f"{path} was made with {key} {manifest['settings'].get(key)}, now it is "
                    f"{value}: run {option} again with these options"
                )
        again = f"run {option} again"
        if others := other_versions(manifest["versions"]):
            raise UserError(
                f"{path} was made by other versions than are installed here ({others}): install "
                f"the same everywhere, or {again}"
            )
        if manifest["inputs"] != inputs:
            raise UserError(f"{path} was made of other text than is there now: {again}")
        # A shard that was begun again and cut off has a manifest of what is no longer there.
        paths = labelled(shard_outputs(files, shard), path.parent)
        whole = all(file.is_file() for file in paths.values())
        if not whole or manifest["outputs"] != describe_files(paths, hashes):
            raise UserError(f"{path} is not of the files beside it: {again}")
        add_shard(total, manifest["stages"])
    return total


def other_versions(shard: dict[str, str]) -> str:
    """Say which packages had other versions where a shard was made; "" where none had."""
    here = versions()
    return ", ".join(
        f"{name} {shard.get(name, 'absent')}, here {here.get(name, 'absent')}"
        for name in sorted(shard | here)
        if shard.get(name) != here.get(name)
    )


def shard_outputs(files: WmtFiles, shard: int) -> list[Path]:
    """Return what a shard makes."""
    return list(dict.fromkeys([*files.cleaned(shard), *files.ready(shard)]))


def add_shard(total: dict[str, dict], stages: dict[str, dict]) -> None:
    """Add a shard's counts."""
    for name, counts in stages["clean"].items():
        add_counts(total["clean"].setdefault(name, {}), counts)
    for key, number in stages.get("tokenise", {}).items():
        tokens = total.setdefault("tokenise", {})
        tokens[key] = tokens.get(key, 0) + number


# ---- The table and the manifest: what was made, of what, and why lines were dropped.


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


def drop_reasons(stamps: Sequence[dict | None]) -> str:
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


def report_tables(settings: WmtSettings, texts: Texts, stages: dict) -> str:
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


def write_report(files: WmtFiles, texts: Texts, command: Sequence[str], stages: dict, hashes: Hashes) -> None:
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
        f"\n{report_tables(settings, texts, stages)}\n\n{out / 'data-bin'} is what fairseq reads; "
        f"{manifest} says how it was made",
        flush=True,
    )
    for row in set_rows(settings, texts, stages):
        pairs = zip(settings.languages, (row[4::2]), row[3::2], strict=True)
        warn_of_unknown({f"{row[0]}.{one}": (unknown, units) for one, unknown, units in pairs})


def describe_sources(raw: RawText) -> tuple[str, int]:
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


# ---- The stages from raw text to what fairseq reads.
# download  the archives, and
# extract   their text (neither for the user's own files)
# count     every file's lines; both sides of a text must have as many
# held-out  validation and test sets: normalised, tokenised; references are kept as they are
# clean     training text of one shard: normalised and filtered
# tokenise  the same, tokenised (not with --tokenizer none)
# shards    with --merge, in place of the two before: what was made apart is checked
# merge     shards joined, duplicates dropped
# sample    pairs that the subword units are learned on
# learn     the units
# apply     all text in units
# binarise  fairseq-preprocess


class WmtPreparation(Preparation):
    """Parallel text to fairseq's binary form."""

    def __init__(self, settings: WmtSettings):
        super().__init__(settings.out)
        self.settings = settings
        self.waits = settings.shard is not None  # for the shard that downloads and extracts
        self.raw = RawText(settings)
        self.texts = self.raw.texts
        self.normalisers = tuple(map(Normaliser, settings.languages))
        self.files = WmtFiles(settings)

    def tokenisers(self) -> tuple[FastMoses, ...]:
        """Make both sides' tokenisers."""
        return tuple(map(FastMoses, self.settings.languages))

    def stages(self) -> list[Stage]:
        settings = self.settings
        stages = [*self.raw.stages(self.hashes), *self.first_stages()]
        if settings.shard is not None:
            return stages + self.shard_stages(settings.shard)
        joined = [shards_stage(self.files, self.texts, self.hashes)] if settings.shards > 1 else self.shard_stages(1)
        return stages + joined + self.last_stages()

    def report(self, counts: Mapping[str, Mapping], command: Sequence[str]) -> None:
        write = write_report if self.settings.shard is None else write_shard_manifest
        write(self.files, self.texts, command, dict(counts), self.hashes)

    def announce(self) -> None:
        """Print what will be read and how much disk the whole needs."""
        described, needed = describe_sources(self.raw)
        print(f"{described}\n\ndisk needed in {self.out}: about {describe_size(needed)}", flush=True)
        if self.raw.lacks_czeng():
            print("without CzEng, which the papers train on: name its folder with --czeng", flush=True)

    def require_space(self) -> None:
        """Check that the disk has room for what a first run has still to write."""
        if not (self.out / "manifest.json").exists():
            needed = describe_sources(self.raw)[1]
            require_space(self.out, max(0, needed - bytes_below(self.out)))

    # Stages that every shard needs

    def first_stages(self) -> list[Stage]:
        """Return the stages count and held-out."""
        settings, held_out = self.settings, self.texts.held_out
        made = [path for s in held_out for path in (*self.files.held_out(s), *self.files.references(s))]
        named = {text.name: [path.name for path in text.paths] for text in self.texts.training}
        chosen = {"languages": settings.languages, "tokenizer": settings.tokenizer, "splits": self.texts.names}
        read = [self.files.pairs, *self.texts.paths(list(held_out.values()))]
        return [
            Stage("count", self.run_count, self.texts.paths(), [self.files.pairs], {"texts": named}),
            Stage("held-out", self.run_held_out, read, [*made, self.files.folded], chosen),
        ]

    def run_count(self) -> dict[str, int]:
        """Count the pairs of every text."""
        texts = [*self.texts.training, *self.texts.held_out.values()]
        counts = {text.name: text.count() for text in texts}
        for text in texts:
            if not counts[text.name]:
                raise UserError(f"{text.name} has no sentence: fill {' and '.join(map(str, text.paths))}")
        write_json(self.files.pairs, counts)
        return counts

    def run_held_out(self) -> dict[str, int]:
        """Normalise and tokenise validation and test sets; nothing is dropped from them."""
        pairs, folded = read_json(self.files.pairs), set()
        tokenisers = self.tokenisers() if self.files.tokenises else (str, str)
        for split, text in self.texts.held_out.items():
            with open_together(*self.files.held_out(split), *self.files.references(split)) as files:
                for side, path in enumerate(text.paths):
                    for line in read_lines(path, longest=LONGEST_SIDE):
                        normal = self.normalisers[side](line)
                        folded.add(normal.casefold())
                        files[side].write(f"{tokenisers[side](normal)}\n".encode())
                        files[2 + side].write(f"{line}\n".encode())
        with open_together(self.files.folded) as (file,):
            file.writelines(f"{line}\n".encode() for line in sorted(folded) if line)
        return {split: pairs[text.name] for split, text in self.texts.held_out.items()}

    # Stages of a shard

    def shard_stages(self, shard: int) -> list[Stage]:
        """Return the stages clean and, if asked for, tokenise."""
        settings, home = self.settings, self.files.shard_folder(shard)
        cleaned, ready = self.files.cleaned(shard), self.files.ready(shard)
        skipped = {text.name: sorted(text.skipped) for text in self.texts.training if text.skipped}
        own = {"shard": [shard, settings.shards], "skipped blocks": skipped}
        parameters = settings.cleaning() | own
        read = [*self.texts.paths(self.texts.training), self.files.pairs, self.files.folded]
        stages = [Stage("clean", lambda: self.run_clean(shard), read, cleaned, parameters, home=home)]
        if self.files.tokenises:
            stages.append(
                Stage(
                    "tokenise",
                    lambda: self.run_tokenise(cleaned, ready),
                    cleaned[:2],
                    [*ready],
                    {"languages": settings.languages},
                    home=home,
                )
            )
        return stages

    def run_clean(self, shard: int) -> dict:
        """Normalise and filter a shard."""
        settings, pairs = self.settings, read_json(self.files.pairs)
        filter = Filter(*settings.languages, settings.limits, set(read_lines(self.files.folded)))
        return clean_shard(
            [(text, pairs[text.name]) for text in self.texts.training],
            Cleaner(self.normalisers, filter, settings.on_bad_line),
            self.files.cleaned(shard),
            workers=settings.workers,
            sample=settings.sample,
            seed=settings.seed,
            shard=(shard, settings.shards),
        )

    def run_tokenise(self, cleaned: list[Path], ready: tuple[Path, Path]) -> dict:
        """Tokenise a shard."""
        counts = apply_to_files(self.tokenisers(), tuple(cleaned[:2]), ready, self.settings.workers, "tokenise")
        return dict(zip(("pairs", *self.settings.languages), counts, strict=True))

    # Stages after the shards

    def last_stages(self) -> list[Stage]:
        """Return the stages merge, sample, learn, apply and binarise."""
        settings = self.settings
        numbers = range(1, settings.shards + 1)
        records = [self.files.cleaned(number)[2] for number in numbers]
        parts = [self.files.ready(number) for number in numbers]
        splits = ["train", *self.texts.held_out]
        text = [path for split in splits for path in settings.sides(self.out / "text", split)]
        units = [path for split in splits for path in self.files.units(split)]
        data, languages = self.out / "data-bin", {"languages": settings.languages}
        sampled = {"pairs": settings.learn_lines, "seed": settings.seed}
        joined = [*(path for part in parts for path in part), *records]
        train, model, sample = [*self.files.train], [self.files.model], [self.files.sample]
        bpe, learning = {"bpe": settings.bpe}, settings.units()
        return [
            Stage("merge", lambda: drop_duplicates(parts, records, self.files.train), joined, train),
            Stage("sample", self.run_sample, train, sample, sampled),
            Stage("learn", self.run_learn, sample, model, learning),
            Stage("apply", lambda: self.run_apply(splits), [*model, *text], units, bpe),
            Stage("binarise", lambda: self.run_binarise(data), units, [data], languages),
        ]

    def run_sample(self) -> dict:
        """Choose what the units are learned on."""
        with self.files.train[0].open("rb") as file:
            pairs = sum(1 for _ in file)
        if not pairs:
            stamps = [
                read_stamp(self.files.shard_folder(number + 1) / STAMPS / "clean.json")
                for number in range(self.settings.shards)
            ]
            raise UserError(
                f"no training pair is left after filtering ({drop_reasons(stamps)}): look at "
                "--max-words, --max-ratio and the languages' order"
            )
        settings = self.settings
        chosen = write_sample(self.files.train, pairs, settings.learn_lines, settings.seed, self.files.sample)
        return {"pairs": chosen}

    def run_learn(self) -> dict:
        """Learn the units."""
        settings = self.settings
        if settings.bpe == SUBWORD_NMT:
            learn_subword_nmt(self.files.sample, settings.vocab_size, self.files.model)
        else:
            learn_sentencepiece(self.files.sample, settings.vocab_size, settings.model_type, self.files.model)
        return {}

    def run_apply(self, splits: list[str]) -> dict:
        """Cut all text into units."""
        units = load_subwords(self.settings.bpe, self.files.model)
        counts = {}
        for split in splits:
            files = self.settings.sides(self.out / "text", split)
            found = apply_to_files((units, units), files, self.files.units(split), self.settings.workers, "apply")
            counts[split] = dict(zip(("pairs", *self.settings.languages), found, strict=True))
        return counts

    def run_binarise(self, binary: Path) -> dict:
        """Run fairseq-preprocess."""
        settings, folder = self.settings, self.out / "units"
        valid, tests = (
            ",".join(str(folder / split) for split in self.texts.held_out if split.startswith(part))
            for part in ("valid", "test")
        )
        preprocess(
            [
                "--source-lang",
                settings.source,
                "--target-lang",
                settings.target,
                "--joined-dictionary",
                "--trainpref",
                folder / "train",
                "--validpref",
                valid,
                *(["--testpref", tests] if tests else []),
                "--destdir",
                binary,
            ],
            settings.workers,
        )
        dictionary = binary / f"dict.{settings.source}.txt"
        entries = sum(1 for _ in read_lines(dictionary))
        prefix = f"{binary}/{{}}.{settings.source}-{settings.target}.{{}}"
        unknown = {
            split: {one: count_unknown(prefix.format(split, one), entries + NSPECIAL) for one in settings.languages}
            for split in ("train", *self.texts.held_out)
        }
        return {"dictionary": entries, "unknown": unknown}
