"""The stages from raw text to what fairseq reads.

download  the archives, and
extract   their text (neither for the user's own files)
count     every file's lines; both sides of a text must have as many
held-out  validation and test sets: normalised, tokenised; references are kept as they are
clean     training text of one shard: normalised and filtered
tokenise  the same, tokenised (not with --tokenizer none)
shards    with --merge, in place of the two before: what was made apart is checked
merge     shards joined, duplicates dropped
sample    pairs that the subword units are learned on
learn     the units
apply     all text in units
binarise  fairseq-preprocess
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from relpos_fairseq.data.dictionary import NSPECIAL
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import bytes_below, describe_size, open_together, read_json, require_space, write_json
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.stages import STAMPS, Stage, read_stamp
from relpos_fairseq.preparation.base import Preparation
from relpos_fairseq.preparation.binarise import preprocess
from relpos_fairseq.preparation.unknown import count_unknown
from relpos_fairseq.preparation.wmt import report, shards
from relpos_fairseq.preparation.wmt.clean import Cleaner, clean
from relpos_fairseq.preparation.wmt.duplicates import drop_duplicates
from relpos_fairseq.preparation.wmt.files import WmtFiles
from relpos_fairseq.preparation.wmt.filters import Filter
from relpos_fairseq.preparation.wmt.normalise import Normaliser
from relpos_fairseq.preparation.wmt.obtain import RawText
from relpos_fairseq.preparation.wmt.parallel import LONGEST_SIDE
from relpos_fairseq.preparation.wmt.settings import SUBWORD_NMT, WmtSettings
from relpos_fairseq.preparation.wmt.subwords import (
    apply,
    learn_sentencepiece,
    learn_subword_nmt,
    load_units,
    write_sample,
)
from relpos_fairseq.preparation.wmt.tokenise import FastMoses


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
        joined = [shards.stage(self.files, self.texts, self.hashes)] if settings.shards > 1 else self.shard_stages(1)
        return stages + joined + self.last_stages()

    def report(self, counts: Mapping[str, Mapping], command: Sequence[str]) -> None:
        write = report.write if self.settings.shard is None else shards.write
        write(self.files, self.texts, command, dict(counts), self.hashes)

    def announce(self) -> None:
        """Print what will be read and how much disk the whole needs."""
        described, needed = report.describe(self.raw)
        print(f"{described}\n\ndisk needed in {self.out}: about {describe_size(needed)}", flush=True)
        if self.raw.lacks_czeng():
            print("without CzEng, which the papers train on: name its folder with --czeng", flush=True)

    def require_space(self) -> None:
        """Check that the disk has room for what a first run has still to write."""
        if not (self.out / "manifest.json").exists():
            needed = report.describe(self.raw)[1]
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
                raise PreparationError(f"{text.name} has no sentence: fill {' and '.join(map(str, text.paths))}")
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
        return clean(
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
        counts = apply(self.tokenisers(), tuple(cleaned[:2]), ready, self.settings.workers, "tokenise")
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
            raise PreparationError(
                f"no training pair is left after filtering ({report.reasons(stamps)}): look at "
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
        units = load_units(self.settings.bpe, self.files.model)
        counts = {}
        for split in splits:
            files = self.settings.sides(self.out / "text", split)
            found = apply((units, units), files, self.files.units(split), self.settings.workers, "apply")
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
