"""The stages from raw text to what fairseq reads.

count     every file's lines; both sides of a text must have as many
held-out  validation and test sets: normalised, tokenised; references are kept as they are
clean     training text of one shard: normalised and filtered
tokenise  the same, tokenised (not with --tokenizer none)
merge     shards joined, duplicates dropped
sample    pairs that the subword units are learned on
learn     the units
apply     all text in units
binarise  fairseq-preprocess
"""

from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.stages import Stage
from relpos_fairseq.preparation.binarise import preprocess
from relpos_fairseq.preparation.wmt.clean import Cleaner, clean
from relpos_fairseq.preparation.wmt.duplicates import drop_duplicates
from relpos_fairseq.preparation.wmt.filters import Filter
from relpos_fairseq.preparation.wmt.local import Texts
from relpos_fairseq.preparation.wmt.normalise import Normaliser
from relpos_fairseq.preparation.wmt.parallel import LONGEST_SIDE, Outputs
from relpos_fairseq.preparation.wmt.settings import Settings
from relpos_fairseq.preparation.wmt.subwords import (
    FILE_NAME,
    SUBWORD_NMT,
    apply,
    learn_sentencepiece,
    learn_subword_nmt,
    load_units,
    write_sample,
)
from relpos_fairseq.preparation.wmt.tokenise import FastMoses


class Pipeline:
    """The stages of one preparation.

    Args:
        settings: What is asked for.
        texts: What is read.
    """

    def __init__(self, settings: Settings, texts: Texts):
        self.settings, self.texts = settings, texts
        self.out = settings.out
        self.normalisers = tuple(map(Normaliser, settings.languages))
        self.counts: dict[str, int] = {}  # lines of each text, from the stage count
        self.folded = self.out / "text" / "held-out.txt"
        self.train = settings.sides(self.out / "text", "train")
        self.model = self.out / "units" / FILE_NAME[settings.bpe]
        self.sample = self.out / "units" / "sample.txt"

    @property
    def tokenises(self) -> bool:
        """Whether words are cut from punctuation before units are learned."""
        return self.settings.tokenizer == "moses"

    def tokenisers(self) -> tuple[FastMoses, ...]:
        """Makes both sides' tokenisers."""
        return tuple(map(FastMoses, self.settings.languages))

    def held_out(self, split: str) -> tuple[Path, Path]:
        """Returns the files of a validation or test set, ready for units."""
        return self.settings.sides(self.out / "text", split)

    def references(self, split: str) -> tuple[Path, Path]:
        """Returns the files of a held-out set as they were, which translations are scored on."""
        return self.settings.sides(self.out / "reference", split)

    def units(self, split: str) -> tuple[Path, Path]:
        """Returns the files of a set in units."""
        return self.settings.sides(self.out / "units", split)

    def shard_folder(self, shard: int) -> Path:
        """Returns the folder of a shard."""
        return self.out / "shards" / f"{shard}-of-{self.settings.shards}"

    def cleaned(self, shard: int) -> list[Path]:
        """Returns a shard's source lines, target lines and records."""
        folder = self.shard_folder(shard)
        return [*self.settings.sides(folder, "clean"), folder / "clean.records"]

    def ready(self, shard: int) -> tuple[Path, Path]:
        """Returns a shard's lines as units are learned on them."""
        name = "tokens" if self.tokenises else "clean"
        return self.settings.sides(self.shard_folder(shard), name)

    # Stages that every shard needs

    def first_stages(self) -> list[Stage]:
        """Returns the stages count and held-out."""
        splits = list(self.texts.held_out)
        made = [path for s in splits for path in (*self.held_out(s), *self.references(s))]
        described = {text.name: [path.name for path in text.paths] for text in self.texts.training}
        return [
            Stage("count", self.run_count, self.texts.paths(), [], {"texts": described}),
            Stage("held-out", self.run_held_out,
                  self.texts.paths(list(self.texts.held_out.values())), [*made, self.folded],
                  {"languages": self.settings.languages, "tokenizer": self.settings.tokenizer,
                   "splits": self.texts.names}),
        ]  # fmt: skip

    def run_count(self) -> dict:
        """Counts the pairs of every text."""
        return {text.name: text.count() for text in self.everything()}

    def everything(self) -> list:
        """Returns the training and the held-out texts."""
        return [*self.texts.training, *self.texts.held_out.values()]

    def run_held_out(self) -> dict:
        """Normalises and tokenises validation and test sets; nothing is dropped from them."""
        counts, folded = {}, set()
        tokenisers = self.tokenisers() if self.tokenises else (str, str)
        for split, text in self.texts.held_out.items():
            counts[split] = text.count()
            if not counts[split]:
                raise PreparationError(
                    f"{text.name} has no sentence: fill {' and '.join(map(str, text.paths))}"
                )
            with Outputs([*self.held_out(split), *self.references(split)]) as files:
                for side, path in enumerate(text.paths):
                    for line in read_lines(path, longest=LONGEST_SIDE):
                        normal = self.normalisers[side](line)
                        folded.add(normal.casefold())
                        files[side].write(f"{tokenisers[side](normal)}\n".encode())
                        files[2 + side].write(f"{line}\n".encode())
        with Outputs([self.folded]) as (file,):
            file.writelines(f"{line}\n".encode() for line in sorted(folded) if line)
        return counts

    # Stages of a shard

    def shard_stages(self, shard: int) -> list[Stage]:
        """Returns the stages clean and, if asked for, tokenise."""
        settings = self.settings
        cleaned, ready = self.cleaned(shard), self.ready(shard)
        parameters = settings.cleaning() | {"shard": [shard, settings.shards], "lines": self.counts}
        czeng = {text.name: sorted(text.skipped) for text in self.texts.training if text.skipped}
        stages = [
            Stage("clean", lambda: self.run_clean(shard),
                  [*self.texts.paths(self.texts.training), self.folded], cleaned,
                  parameters | {"skipped blocks": czeng}),
        ]  # fmt: skip
        if self.tokenises:
            stages.append(
                Stage("tokenise", lambda: self.run_tokenise(cleaned, ready), cleaned[:2], [*ready],
                      {"languages": settings.languages})
            )  # fmt: skip
        return stages

    def run_clean(self, shard: int) -> dict:
        """Normalises and filters a shard."""
        settings = self.settings
        filter = Filter(*settings.languages, settings.limits, set(read_lines(self.folded)))
        texts = [(text, self.counts[text.name]) for text in self.texts.training]
        return clean(
            texts,
            Cleaner(self.normalisers, filter, settings.on_bad_line),
            self.cleaned(shard),
            workers=settings.workers,
            sample=settings.sample,
            seed=settings.seed,
            shard=(shard, settings.shards),
        )

    def run_tokenise(self, cleaned: list[Path], ready: tuple[Path, Path]) -> dict:
        """Tokenises a shard."""
        counts = apply(
            self.tokenisers(), tuple(cleaned[:2]), ready, self.settings.workers, "tokenise"
        )
        return dict(zip(("pairs", *self.settings.languages), counts, strict=True))

    # Stages after the shards

    def last_stages(self) -> list[Stage]:
        """Returns the stages merge, sample, learn, apply and binarise."""
        settings = self.settings
        shards = range(1, settings.shards + 1)
        records = [self.cleaned(shard)[2] for shard in shards]
        parts = [self.ready(shard) for shard in shards]
        splits = ["train", *self.texts.held_out]
        text = [path for split in splits for path in settings.sides(self.out / "text", split)]
        in_units = [path for split in splits for path in self.units(split)]
        binary = self.out / "data-bin"
        return [
            Stage("merge", lambda: drop_duplicates(parts, records, self.train),
                  [*(path for part in parts for path in part), *records], [*self.train]),
            Stage("sample", self.run_sample, [*self.train], [self.sample],
                  {"pairs": settings.learn_lines, "seed": settings.seed}),
            Stage("learn", self.run_learn, [self.sample], [self.model], settings.units()),
            Stage("apply", lambda: self.run_apply(splits), [self.model, *text], in_units,
                  {"bpe": settings.bpe}),
            Stage("binarise", lambda: self.run_binarise(binary), in_units, [binary],
                  {"languages": settings.languages}),
        ]  # fmt: skip

    def run_sample(self) -> dict:
        """Chooses what the units are learned on."""
        with self.train[0].open("rb") as file:
            pairs = sum(1 for _ in file)
        if not pairs:
            raise PreparationError(
                "no training pair is left after filtering: look at the counts above and at "
                "--max-words, --max-ratio and the languages' order"
            )
        settings = self.settings
        chosen = write_sample(self.train, pairs, settings.learn_lines, settings.seed, self.sample)
        return {"pairs": chosen}

    def run_learn(self) -> dict:
        """Learns the units."""
        settings = self.settings
        if settings.bpe == SUBWORD_NMT:
            learn_subword_nmt(self.sample, settings.vocab_size, self.model)
        else:
            learn_sentencepiece(self.sample, settings.vocab_size, settings.model_type, self.model)
        return {}

    def run_apply(self, splits: list[str]) -> dict:
        """Cuts all text into units."""
        units = load_units(self.settings.bpe, self.model)
        counts = {}
        for split in splits:
            files = self.settings.sides(self.out / "text", split)
            found = apply((units, units), files, self.units(split), self.settings.workers, "apply")
            counts[split] = dict(zip(("pairs", *self.settings.languages), found, strict=True))
        return counts

    def run_binarise(self, binary: Path) -> dict:
        """Runs fairseq-preprocess."""
        settings = self.settings
        folder = self.out / "units"
        tests = [split for split in self.texts.held_out if split.startswith("test")]
        valid = [split for split in self.texts.held_out if split.startswith("valid")]
        preprocess(
            ["--source-lang", settings.source, "--target-lang", settings.target,
             "--joined-dictionary", "--trainpref", folder / "train",
             "--validpref", ",".join(str(folder / split) for split in valid),
             "--testpref", ",".join(str(folder / split) for split in tests),
             "--destdir", binary],
            settings.workers,
        )  # fmt: skip
        dictionary = binary / f"dict.{settings.source}.txt"
        return {"dictionary": sum(1 for _ in read_lines(dictionary))}
