"""Prepare parallel text for translation: from raw text to the folder that fairseq reads.

| stage | makes |
|---|---|
| download, extract | the archives and their text (neither for the user's own files) |
| count | the number of lines of every file (both sides of a text must have as many), and how lengths are compared |
| held-out | validation and test sets, normalized and tokenized; the references are kept unchanged |
| clean, tokenise | the training text of one shard, normalized and filtered; tokenized unless `--tokenizer none` |
| shards | with `--merge`, in place of these two: the shards that were made apart are checked |
| merge | the shards joined, without duplicates |
| sample, learn, apply | the pairs that subwords are learned on, the subword model, all text in subwords |
| binarise | `data-bin`, with one dictionary |
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypedDict

from relpos_fairseq.io.downloads import agree
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import bytes_below, describe_size, open_together, require_space, write_json
from relpos_fairseq.io.lines import COMPRESSED, count_lines, read_lines
from relpos_fairseq.io.manifests import Manifest, describe_files, labelled, versions
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.io.stages import STAMPS, Stage, read_stamp
from relpos_fairseq.preparation.binarise import binarise_pairs, count_dictionary
from relpos_fairseq.preparation.cleaning import (
    DROPPED,
    EXAMPLES,
    REASONS,
    Cleaner,
    Filter,
    add_counts,
    clean_shard,
    drop_duplicates,
    switch,
    write_sample,
)
from relpos_fairseq.preparation.lengths import Lengths, measure_lengths
from relpos_fairseq.preparation.parallel_text import LONGEST_SIDE, RawText, apply_to_files
from relpos_fairseq.preparation.pipeline import Preparation, Report, TextLines
from relpos_fairseq.preparation.wmt_settings import DUPLICATE, SUBWORD_NMT, WmtSettings
from relpos_fairseq.text.assets import ParallelText
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import read_dictionary
from relpos_fairseq.text.moses import FastMoses, Normaliser, on_one_line
from relpos_fairseq.text.subwords import IDENTITY, load_subwords
from relpos_fairseq.text.training import learn_sentencepiece, learn_subword_nmt

Counts = dict[str, list[int]]  # pairs, source words and target words, by reason
Dropped = dict[str, dict[str, list[tuple[int, str, str]]]]  # examples: line, source, target; by corpus and reason
MANIFEST = "manifest.json"
COPIES = 4  # of the text in stages: cleaned, tokenized, merged, in subwords
PACKED = 4  # bytes of text in a byte of a compressed file, about


class _Lengths(TypedDict):
    units: tuple[str, str]
    scales: tuple[float, float]


class _Stages(TypedDict, total=False):
    clean: dict[str, Counts]
    tokenise: dict[str, int]


class _ShardManifest(TypedDict):
    """What is read of a shard's manifest."""

    settings: dict[str, object]
    versions: dict[str, str]
    inputs: dict[str, object]
    outputs: dict[str, object]
    stages: _Stages


class WmtPreparation(Preparation):
    """Parallel text to fairseq's binary form."""

    def __init__(self, settings: WmtSettings):
        super().__init__(settings.out)
        self.settings = settings
        self.waits = settings.shard is not None  # for the shard that downloads and extracts
        self.raw = RawText(settings)
        self.texts = self.raw.texts
        self.splits = ["train", *self.texts.held_out]
        kept = settings.options.normalization == IDENTITY
        self.normalisers = (on_one_line, on_one_line) if kept else tuple(map(Normaliser, settings.languages))

    def tokenisers(self) -> tuple[FastMoses, ...]:
        """Return both sides' tokenizers."""
        return tuple(map(FastMoses, self.settings.languages))

    def stages(self) -> list[Stage]:
        settings = self.settings
        stages = [*self.raw.stages(self.hashes), *self.first_stages()]
        if settings.shard is not None:
            return stages + self.shard_stages(settings.shard)
        joined = [self.shards_stage()] if settings.shards > 1 else self.shard_stages(1)
        return stages + joined + self.last_stages()

    def announce(self) -> None:
        """Print the sources of the text, and the disk space that the whole needs."""
        described, needed = describe_sources(self.raw)
        print(f"{described}\n\ndisk needed in {self.out}: about {describe_size(needed)}", flush=True)
        if self.raw.lacks_czeng:
            print("without CzEng, which the papers train on: name its folder with --czeng", flush=True)

    def check_pair(self) -> None:
        """Raise a UserError if the folder holds another pair, whose files this one's would replace."""
        known = (read_json(self.out / MANIFEST, Manifest, {}).get("settings") or {}).get("languages")
        if known and tuple(known) != self.settings.languages:
            given = "-".join(self.settings.languages)
            raise UserError(
                f"--out {self.out} holds {'-'.join(known)}, which {given} would replace: name another folder"
            )

    def agree(self, yes: bool) -> None:
        """Have the download of what is not here agreed to: by `yes`, or by an answer on a terminal."""
        if self.settings.options.from_dir is None:
            agree(self.raw.archives(), self.settings.downloads, yes, self.hashes)

    def require_space(self) -> None:
        """Check that the disk has room for the files that a first run has still to write."""
        if not (self.out / MANIFEST).exists():
            needed = describe_sources(self.raw)[1]
            require_space(self.out, max(0, needed - bytes_below(self.out)))

    # Stages that every shard needs

    def first_stages(self) -> list[Stage]:
        """Return the stages count and held-out."""
        settings, held_out = self.settings, self.texts.held_out
        made = [path for split in held_out for path in (*self.settings.text(split), *self.settings.references(split))]
        named = {text.name: [path.name for path in text.paths] for text in self.texts.training}
        chosen = {"languages": settings.languages, "tokenizer": settings.tokenizer, "splits": self.texts.names}
        chosen["normalization"] = settings.options.normalization
        read = [settings.pairs, *self.texts.paths(list(held_out.values()))]
        counted = {"texts": named, "languages": settings.languages, "normalization": settings.options.normalization}
        return [
            Stage("count", self.run_count, self.texts.paths(), [settings.pairs, settings.lengths], counted),
            Stage("held-out", self.run_held_out, read, [*made, self.settings.folded], chosen),
        ]

    def run_count(self) -> dict[str, int]:
        """Count the pairs of every text; measure the lengths of the training text's sides."""
        texts = [*self.texts.training, *self.texts.held_out.values()]
        counts = {text.name: text.count() for text in texts}
        for text in texts:
            if not counts[text.name]:
                raise UserError(f"{text.name} has no sentence: fill {' and '.join(map(str, text.paths))}")
        write_json(self.settings.pairs, counts)
        lengths = measure_lengths(self.texts.training, self.settings.languages, self.normalisers)
        write_json(self.settings.lengths, asdict(lengths))
        return counts

    def lengths(self) -> Lengths:
        """Return how the lengths of the training text's sides are compared, as the stage count measured it."""
        found = read_json(self.settings.lengths, _Lengths, remedy="delete it")
        return Lengths(tuple(found["units"]), tuple(found["scales"]))

    def pairs(self) -> dict[str, int]:
        """Return every text's number of pairs, as the stage count counted them."""
        return read_json(self.settings.pairs, dict[str, int], remedy="delete it")

    def run_held_out(self) -> dict[str, int]:
        """Normalize and tokenize validation and test sets; nothing is dropped from them."""
        pairs, folded = self.pairs(), set()
        tokenisers = self.tokenisers() if self.settings.tokenises else (str, str)
        for split, text in self.texts.held_out.items():
            with open_together(*self.settings.text(split), *self.settings.references(split)) as files:
                for side, path in enumerate(text.paths):
                    for line in read_lines(path, longest=LONGEST_SIDE):
                        normal = self.normalisers[side](line)
                        folded.add(normal.casefold())
                        files[side].write(f"{tokenisers[side](normal)}\n".encode())
                        files[2 + side].write(f"{line}\n".encode())
        with open_together(self.settings.folded) as (file,):
            file.writelines(f"{line}\n".encode() for line in sorted(folded) if line)
        return {split: pairs[text.name] for split, text in self.texts.held_out.items()}

    # Stages of a shard

    def shard_stages(self, shard: int) -> list[Stage]:
        """Return the stages clean and, if asked for, tokenise."""
        settings, home = self.settings, self.settings.shard_folder(shard)
        cleaned, ready = self.settings.cleaned(shard), self.settings.ready(shard)
        skipped = {text.name: sorted(text.skipped) for text in self.texts.training if text.skipped}
        parameters = settings.cleaning() | {"shard": [shard, settings.shards], "skipped blocks": skipped}
        parameters["max_dropped"] = settings.options.max_dropped
        read = [*self.texts.paths(self.texts.training), settings.pairs, settings.lengths, settings.folded]
        made = [*cleaned, settings.dropped(shard)]
        stages = [Stage("clean", lambda: self.run_clean(shard), read, made, parameters, home=home)]
        if self.settings.tokenises:
            languages = {"languages": settings.languages}
            run = lambda: self.run_tokenise(cleaned, ready)  # noqa: E731
            stages.append(Stage("tokenise", run, cleaned[:2], [*ready], languages, home=home))
        return stages

    def run_clean(self, shard: int) -> dict:
        """Normalize and filter a shard."""
        settings, pairs = self.settings, self.pairs()
        held_out = set(read_lines(settings.folded))
        filter = Filter(*settings.languages, settings.options, held_out, self.lengths())
        return clean_shard(
            [(text, pairs[text.name]) for text in self.texts.training],
            Cleaner(self.normalisers, filter, settings.options.on_bad_line),
            settings.cleaned(shard),
            settings.dropped(shard),
            workers=settings.options.workers,
            sample=settings.options.sample,
            seed=settings.options.seed,
            shard=(shard, settings.shards),
        )

    def run_tokenise(self, cleaned: list[Path], ready: tuple[Path, Path]) -> dict:
        """Tokenize a shard."""
        return self.apply(self.tokenisers(), tuple(cleaned[:2]), ready, "tokenise")

    def apply(self, functions: tuple, files: tuple[Path, Path], outputs: tuple[Path, Path], name: str) -> dict:
        """Apply a function to each side; return the numbers of pairs and of each language's words."""
        counts = apply_to_files(functions, files, outputs, self.settings.options.workers, name)
        return dict(zip(("pairs", *self.settings.languages), counts, strict=True))

    # Shards that were made apart

    def shards_stage(self) -> Stage:
        """Return the stage that checks the shards; its counts are the sum of theirs, by stage."""
        settings = self.settings
        shards = range(1, settings.shards + 1)
        made = [settings.shard_folder(shard) / MANIFEST for shard in shards]
        made += [path for shard in shards for path in settings.of_shard(shard)]
        there = [path for path in made if path.is_file()]
        asked = settings.cleaning() | {"shards": settings.shards}
        return Stage("shards", self.read_shards, [*self.texts.paths(), *there], [], asked)

    def read_shards(self) -> dict[str, dict]:
        """Return the sum of all shards' counts, by stage.

        Raises:
            UserError: A shard is missing, was made with other settings, by other versions or of
                other text, or was changed or left unfinished since.
        """
        settings = self.settings
        wanted = {**settings.cleaning(), "languages": [*settings.languages]}
        cleaned: dict[str, Counts] = {}
        tokens = Counter()
        inputs = describe_files(labelled(self.texts.paths(), None), self.hashes)
        for shard in range(1, settings.shards + 1):
            path = settings.shard_folder(shard) / MANIFEST
            manifest = read_json(path, _ShardManifest, None)
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
            # A shard that was begun again and cut off has a manifest of files that are gone.
            paths = labelled(settings.of_shard(shard), path.parent)
            whole = all(file.is_file() for file in paths.values())
            if not whole or manifest["outputs"] != describe_files(paths, self.hashes):
                raise UserError(f"{path} is not of the files beside it: {again}")
            for name, counts in manifest["stages"].get("clean", {}).items():
                add_counts(cleaned.setdefault(name, {}), counts)
            tokens.update(manifest["stages"].get("tokenise", {}))
        return {"clean": cleaned} | ({"tokenise": dict(tokens)} if tokens else {})

    # Stages after the shards

    def last_stages(self) -> list[Stage]:
        """Return the stages merge, sample, learn, apply and binarise."""
        settings = self.settings
        numbers = range(1, settings.shards + 1)
        records = [settings.cleaned(number)[2] for number in numbers]
        parts = [settings.ready(number) for number in numbers]
        text = [path for split in self.splits for path in settings.text(split)]
        units = [path for split in self.splits for path in settings.units(split)]
        data, languages = self.out / "data-bin", {"languages": settings.languages, "version": 3}
        apply = {"bpe": settings.options.bpe, "version": 2}
        sampled = {"pairs": settings.options.learn_lines, "seed": settings.options.seed}
        joined = [*(path for part in parts for path in part), *records]
        train, model, sample = [*settings.text("train")], [settings.model], [settings.learned_on]
        merge = partial(drop_duplicates, parts, records, settings.text("train"), settings.options)
        return [
            Stage("merge", merge, joined, train, settings.merging()),
            Stage("sample", self.run_sample, train, sample, sampled),
            Stage("learn", self.run_learn, sample, model, settings.learning()),
            Stage("apply", self.run_apply, [*model, *text], [*units, settings.dictionary], apply),
            Stage("binarise", lambda: self.run_binarise(data), [*units, settings.dictionary], [data], languages),
        ]

    def run_sample(self) -> dict:
        """Choose the pairs that subwords are learned on."""
        settings = self.settings
        pairs = count_lines(settings.text("train")[0])
        if not pairs:
            shards = map(settings.shard_folder, range(1, settings.shards + 1))
            stamps = [read_stamp(folder / STAMPS / "clean.json") for folder in shards]
            total = sum_counts(counts for stamp in stamps for counts in (stamp or {}).get("counts", {}).values())
            named = ((reason, total[reason][0]) for reason in ("read", *DROPPED) if reason in total)
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in named if count)
            most = max(REASONS, key=lambda reason: total.get(reason, [0])[0])
            way = f"{switch(most)} keeps such pairs" if most in total else "mend the lines"
            raise UserError(f"no training pair is left after filtering ({reasons}): {way}")
        files, sample = settings.text("train"), settings.learned_on
        return {"pairs": write_sample(files, pairs, settings.options.learn_lines, settings.options.seed, sample)}

    def run_learn(self) -> dict:
        """Learn the subwords."""
        settings = self.settings
        if settings.options.bpe == SUBWORD_NMT:
            learn_subword_nmt(settings.learned_on, settings.options.vocab_size, settings.model)
        else:
            chosen = settings.options.vocab_size, settings.model_type, settings.model, settings.options.normalization
            learn_sentencepiece(settings.learned_on, *chosen)
        return {}

    def run_apply(self) -> dict:
        """Cut all text into subwords: the training text, and the other sets into those that it has."""
        settings, counts, known = self.settings, {}, []
        for split in self.splits:  # "train" is the first
            subwords = load_subwords(settings.options.bpe, settings.model, known)
            cut = (lambda line, subwords=subwords: " ".join(subwords(line)),) * 2
            counts[split] = self.apply(cut, settings.text(split), settings.units(split), "apply")
            if split == "train":
                how = settings.options.bpe, settings.dictionary, settings.options.workers
                known = count_dictionary(settings.units(split), *how)
        return counts

    def run_binarise(self, binary: Path) -> dict:
        """Write fairseq's files; count the dictionary's entries and the unknown subwords."""
        settings, units = self.settings, {split: self.settings.units(split) for split in self.splits}
        return binarise_pairs(units, settings.languages, settings.dictionary, binary, settings.options.workers)

    # Reports

    def report(self, counts: dict[str, Mapping]) -> list[Report]:
        settings, shard = self.settings, self.settings.shard
        if shard is not None:
            return [
                Report(
                    self.texts.paths(),
                    settings.of_shard(shard),
                    [f"shard {shard} of {settings.shards} is ready; join all with --merge {settings.shards}"],
                    {name: counts[name] for name in ("clean", "tokenise") if name in counts},
                    {"settings": settings.cleaning(), "shard": [shard, settings.shards]},
                    folder=settings.shard_folder(shard),
                )
            ]
        counts |= counts.pop("shards", {})
        outputs = [self.out / "data-bin", settings.model, settings.learned_on, settings.dictionary]
        outputs += [path for split in self.splits for path in settings.units(split)]
        outputs += [path for split in self.texts.held_out for path in settings.references(split)]
        rows = self.set_rows(counts)
        where = f"{self.out / 'data-bin'} is what fairseq reads; {self.out / MANIFEST} says how it was made"
        return [
            Report(
                self.texts.paths(),
                outputs,
                ["", "\n\n".join([*self.tables(counts, rows), where])],
                counts,
                {"settings": settings.cleaning() | settings.merging() | settings.learning(), "sets": self.texts.names},
                {
                    f"{row[0]}.{language}": (unknown, units)
                    for row in rows
                    for language, unknown, units in zip(settings.languages, row[4::2], row[3::2], strict=True)
                },
                self.text_lines(),
            )
        ]

    def text_lines(self) -> dict[str, TextLines]:
        """Return the unchanged lines of the validation set, by their files' names."""
        settings = self.settings
        how = settings.tokenizer, settings.options.bpe, settings.model, settings.options.normalization
        known = set(read_dictionary(self.out / "data-bin" / DICTIONARY))
        return {
            path.name: TextLines(ParallelText(language, *how, known), read_lines(path), known, settings.remedy)
            for language, path in zip(settings.languages, settings.references("valid"), strict=True)
        }

    def set_rows(self, counts: dict[str, Mapping]) -> list[list]:
        """Return a row for each set: pairs, and for both languages the subwords and the unknown ones."""
        rows = []
        for split in self.splits:
            found, unknown = counts["apply"][split], counts["binarise"].get("unknown", {}).get(split, {})
            numbers = (n for one in self.settings.languages for n in (found[one], unknown.get(one, 0)))
            rows.append([split, self.texts.names.get(split, ""), found["pairs"], *numbers])
        return rows

    def tables(self, counts: dict[str, Mapping], rows: list[list]) -> list[str]:
        """Return the tables to print: corpora, the training text from read to kept, sets, subwords."""
        settings, cleaned, parts = self.settings, counts["clean"], []
        source, target = settings.languages
        if len(cleaned) > 1:
            corpora = [[name, found.get("read", [0])[0], found.get("kept", [0])[0]] for name, found in cleaned.items()]
            parts.append(table(corpora, ["corpus", "pairs read", "pairs kept"]))
        units = self.lengths().units
        headers = ["training text", "dropped", "pairs left", f"{source} {units[0]}", f"{target} {units[1]}"]
        parts.append(table(training_rows(cleaned, counts["merge"]), headers))
        places = map(settings.dropped, range(1, settings.shards + 1))
        shards = [read_json(place, Dropped, remedy="delete it") for place in places]
        if examples := example_rows(shards):
            parts.append(table(examples, ["dropped, such as", "corpus", "line", source, target], written=True))
        heads = [head for one in settings.languages for head in (f"{one} units", "unknown")]
        parts.append(table(rows, ["in units", "from", "pairs", *heads]))
        bpe = settings.options.bpe
        kind = f"{bpe} {settings.model_type}" if bpe == "sentencepiece" else bpe
        parts.append(
            f"units: {kind}, {settings.options.vocab_size:,} asked for; "
            f"joined dictionary: {counts['binarise']['dictionary']:,} entries"
        )
        return parts


def sum_counts(several) -> Counts:
    """Add counts by reason."""
    total: Counts = {}
    for counts in several:
        add_counts(total, counts)
    return total


def training_rows(per_corpus: dict[str, Counts], merged: Counts) -> list[list]:
    """Return the rows from read to kept: the pairs that each reason drops, and those that it leaves.

    Args:
        per_corpus: Each corpus' counts.
        merged: The counts of the stage merge.
    """
    total = sum_counts(per_corpus.values()) | {DUPLICATE: merged.get(DUPLICATE)}
    left = total.get("read", [0, 0, 0])
    rows = [["read", "", *left]]
    for reason in (*DROPPED, DUPLICATE):
        dropped = total.get(reason)
        if dropped and dropped[0]:
            left = [a - b for a, b in zip(left, dropped, strict=True)]
            rows.append([reason, -dropped[0], *left])
    return rows


def example_rows(shards: list[dict[str, dict[str, list]]]) -> list[list]:
    """Return rows of the first pairs that each reason drops: reason, corpus, line number, source, target.

    Args:
        shards: Every shard's examples, by corpus and reason.
    """
    corpora = dict.fromkeys(corpus for shard in shards for corpus in shard)
    found = {
        reason: [[corpus, *pair] for corpus in corpora for shard in shards for pair in shard[corpus].get(reason, [])]
        for reason in DROPPED
    }
    return [
        [reason, *(str(cell).replace("|", "\\|") for cell in row)]
        for reason, rows in found.items()
        for row in rows[:EXAMPLES]
    ]


def describe_sources(raw: RawText) -> tuple[str, int]:
    """Return a table of the text that will be read, and the bytes of disk that the whole needs."""
    archives = raw.archives()
    rows = [
        [one.name, describe_size(one.size), "sha256" if one.sha256 else "sacrebleu's md5", one.urls[0], one.licence]
        for one in archives
    ]
    text = sum(corpus.expanded for corpus in raw.corpora)
    for path in raw.texts.paths():
        # The size of extracted text is counted already, whether or not it is extracted by now.
        if path.exists() and not path.is_relative_to(raw.settings.out / "raw"):
            size = path.stat().st_size
            text += size * (PACKED if path.suffix in COMPRESSED[1:] else 1)
            rows.append([path.name, describe_size(size), "", str(path), ""])
    downloads = 0 if raw.settings.options.from_dir else sum(archive.size or 0 for archive in archives)
    return table(rows, ["source", "size", "checked by", "from", "licence"]), downloads + text * (COPIES + 1)


def other_versions(shard: dict[str, str]) -> str:
    """List the packages that had other versions where a shard was made; "" if there are none."""
    here = versions()
    return ", ".join(
        f"{name} {shard.get(name, 'absent')}, here {here.get(name, 'absent')}"
        for name in sorted(shard | here)
        if shard.get(name) != here.get(name)
    )
