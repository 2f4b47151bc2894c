"""Prepare plain text for masked language models: count, train a tokenizer on a sample, encode, assemble data-bins."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, open_text_out, write_json, write_text
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress, table
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.io.stages import Stage
from relpos_fairseq.preparation.binarise import write_indexed
from relpos_fairseq.preparation.documents import (
    Encoded,
    copies,
    encode_file,
    pack,
    read_stream,
    repetitions,
    shares,
    uniform,
)
from relpos_fairseq.preparation.pipeline import Preparation, Report, TextLines
from relpos_fairseq.preparation.settings import MlmSettings, TextFile
from relpos_fairseq.text import train_tokenizer
from relpos_fairseq.text.assets import TokenizerText, Vocabulary, tokenizer_files
from relpos_fairseq.text.dictionary import EOS

BLOCK = 1 << 16  # random numbers that are drawn at a time
NUMBERS = ("documents", "blocks", "tokens", "split_sentences")  # of each split of each data-bin


class MlmPreparation(Preparation):
    """Plain text to data-bins for masked_lm.

    Args:
        settings: What `check_mlm` makes of the options.

    Attributes:
        work: The folder of files that are needed on the way only.
        tokenizer: The folder of the tokenizer.
        shards: The data-bins.
    """

    def __init__(self, settings: MlmSettings) -> None:
        args = settings.options
        super().__init__(args.out)
        self.args, self.reading, self.sources = args, settings.reading, settings.sources
        self.training = [source for source in self.sources if source.split == "train"]
        self.work = args.out / "work"
        self.counts_file = self.work / "counts.json"
        self.text = self.work / "tokenizer.txt"
        self.tokenizer = args.tokenizer_folder or args.out / "tokenizer"
        data = args.out / "data-bin"
        self.shards = [data / f"shard{n}" for n in range(args.shards)] if args.shards > 1 else [data]

    def encoded(self, source: TextFile) -> list[Path]:
        """Return the encoded text of a file and its index."""
        return [self.work / f"{source.name}{ending}" for ending in (".bin", ".idx")]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return what the stage count counted, by the names of files."""
        return read_json(self.counts_file, dict[str, dict[str, int]], remedy="delete it")

    def sentences(self) -> dict[str, int]:
        """Return the number of training sentences of every language."""
        counts, totals = self.counts(), Counter()
        for source in self.training:
            totals[source.language] += counts[source.name]["sentences"]
        return dict(totals)

    def stages(self) -> list[Stage]:
        args, sources = self.args, self.sources
        reading = {"reading": vars(self.reading)}
        described = {"sources": [[source.name, source.language] for source in sources]}
        stages = [Stage("count", self.count, [one.path for one in sources], [self.counts_file], reading | described)]
        tokenizer = [self.tokenizer]
        if args.tokenizer_folder:
            tokenizer = tokenizer_files(self.tokenizer)
        else:
            read = [self.counts_file, *(source.path for source in self.training)]
            chosen = {"sentences": args.learn_lines, "alpha": args.alpha, "seed": args.seed}
            names = ("vocab_size", "lowercase", "character_coverage")
            trained = {"tokenizer": args.train_tokenizer} | {name: getattr(args, name) for name in names}
            stages += [
                Stage("sample", self.sample, read, [self.text], reading | chosen),
                Stage("tokenizer", self.train_tokenizer, [self.text], [self.tokenizer], trained),
            ]
        for source in sources:
            run = partial(self.encode, source)
            stages.append(Stage(f"encode-{source.name}", run, [source.path, *tokenizer], self.encoded(source), reading))
        read = [self.counts_file, *tokenizer, *(file for source in sources for file in self.encoded(source))]
        names = ("alpha", "pack", "tokens_per_sample", "shards", "seed")
        parameters = {name: getattr(args, name) for name in names} | described
        parameters["hold_out"] = None if args.valid else args.hold_out
        for number, shard in enumerate(self.shards):
            run = partial(self.assemble, number)
            stages.append(Stage(f"assemble-{shard.name}", run, read, [shard], parameters | {"shard": number}))
        return stages

    def count(self) -> dict[str, int]:
        """Count every file's documents and sentences."""
        reading, sources = self.reading, self.sources

        def count_one(source: TextFile) -> Counter:
            counts = Counter()
            for _ in read_stream(source.path, reading, counts):
                pass
            return counts

        results = ordered_map(count_one, sources, self.args.workers)
        found = list(progress(results, total=len(sources), description="count", unit="files"))
        for source, counts in zip(sources, found, strict=True):
            if not counts["sentences"]:
                raise UserError(f"{source.path} has no text")
        write_json(self.counts_file, {source.name: dict(one) for source, one in zip(sources, found, strict=True)})
        return dict(sum(found, Counter()))

    def sample(self) -> dict[str, int]:
        """Write the text that the tokenizer is trained on: every language by its share raised to alpha."""
        sentences = self.sentences()
        wanted = min(self.args.learn_lines, sum(sentences.values()))
        factors = {
            language: share * wanted / sentences[language]
            for language, share in shares(sentences, self.args.alpha).items()
        }
        counts = Counter()
        with open_text_out(self.text) as file:
            for source in self.training:
                for line in self._sampled(source, factors[source.language]):
                    counts[source.language] += 1
                    file.write(f"{line}\n")
        if not counts:
            raise UserError("--learn-lines is too small: no sentence was sampled")
        return dict(counts)

    def _sampled(self, source: TextFile, factor: float) -> Iterator[str]:
        """Yield a file's sentences, each as often as its own random number decides."""
        stream = (item for item in read_stream(source.path, self.reading) if item)
        times = np.empty(0, np.int64)
        for number, sentence in enumerate(stream):
            if number % BLOCK == 0:
                numbers = np.arange(number, number + BLOCK)
                times = copies(factor, uniform(self.args.seed, f"text:{source.name}", numbers))
            for _ in range(int(times[number % BLOCK])):
                yield sentence

    def train_tokenizer(self) -> dict[str, int]:
        """Train the tokenizer on the sample."""
        args = self.args
        options = {"lowercase": True} if args.lowercase else {}
        if args.character_coverage:
            options["character_coverage"] = args.character_coverage
        with atomic_folder(self.tokenizer) as temporary:
            trained = train_tokenizer(
                args.train_tokenizer, temporary, vocab_size=args.vocab_size, files=[self.text], **options
            )
        return {"symbols": len(trained.symbols)}

    def encode(self, source: TextFile) -> dict[str, int]:
        """Encode one file."""
        vocabulary, prefix = Vocabulary(self.tokenizer), self.work / source.name
        return encode_file(source.path, prefix, vocabulary, self.reading, self.args.workers)

    def assemble(self, number: int) -> dict[str, int]:
        """Write one data-bin: training text, the tokenizer, in the first one the validation text too."""
        vocabulary = Vocabulary(self.tokenizer)
        counts = Counter()
        with atomic_folder(self.shards[number]) as folder:
            for split in ("train", "valid") if number == 0 else ("train",):
                found = self._write(folder / split, split, number, vocabulary.size)
                counts.update({f"{split}_{name}": value for name, value in found.items()})
            for file in tokenizer_files(vocabulary.folder):
                shutil.copyfile(file, folder / file.name)
            starts = "".join(f"{int(flag)}\n" for flag in vocabulary.word_starts())  # for --mask-whole-words
            write_text(folder / "word_starts.txt", starts)
        return dict(counts)

    def _write(self, prefix: Path, split: str, shard: int, vocab_size: int) -> Counter:
        """Write a split of a data-bin; return its counts."""
        counts = Counter(dict.fromkeys(NUMBERS, 0))
        documents = progress(self._documents(split, shard, counts), description=f"assemble {split}", unit="documents")
        items = pack(documents, self.args.pack, self.args.tokens_per_sample, EOS, counts)
        write_indexed(prefix, items, vocab_size)
        if counts["blocks"]:
            return counts
        if split == "valid":
            raise UserError(
                f"--hold-out {self.args.hold_out} left no document for validation: raise it, say "
                "with --documents what a document is, or give --valid"
            )
        raise UserError(
            f"a shard has no text: there are fewer training documents than --shards "
            f"{self.args.shards}; use fewer, or say with --documents what a document is"
        )

    def _documents(self, split: str, shard: int, counts: Counter) -> Iterator[list[np.ndarray]]:
        """Yield the documents of a split of a shard, each a list of its sentences' ids."""
        factors = repetitions(self.sentences(), self.args.alpha)
        for source in self.sources:
            encoded = Encoded(self.work / source.name)
            chosen = self.choose(source, len(encoded.spans), split, shard, factors)
            counts["documents"] += len(chosen)
            yield from encoded.documents(chosen)

    def choose(self, source: TextFile, count: int, split: str, shard: int, factors: dict[str, float]) -> np.ndarray:
        """Return the numbers of a file's documents in a split of a shard; a document that repeats occurs repeatedly.

        The c-th copy of document d is in shard (d + c) mod shards, so copies lie apart.
        """
        numbers, args = np.arange(count), self.args
        held_out = np.full(count, source.split == "valid")
        if not args.valid:
            held_out = uniform(args.seed, f"valid:{source.name}", numbers) < args.hold_out
        if split == "valid":
            return numbers[held_out]
        times = copies(factors.get(source.language, 0.0), uniform(args.seed, f"copies:{source.name}", numbers))
        times[held_out] = 0
        every = np.repeat(numbers, times)
        copy = np.arange(len(every)) - np.repeat(np.cumsum(times) - times, times)
        return every[(every + copy) % args.shards == shard]

    def text_lines(self) -> dict[str, TextLines]:
        """Return the sentences of the first file of every language."""
        text, first = TokenizerText(self.tokenizer), {}
        for source in self.sources:
            sentences = filter(None, read_stream(source.path, self.reading))
            first.setdefault(source.language, TextLines(text, sentences))
        return first

    def report(self, counts: dict[str, Mapping]) -> list[Report]:
        args, sentences = self.args, self.sentences()
        factors = repetitions(sentences, args.alpha)
        languages = {
            language: {"sentences": count, "repetitions": round(factors[language], 4)}
            for language, count in sorted(sentences.items())
        }
        known, files = self.counts(), []
        for source in self.sources:
            text, made = known[source.name], counts[f"encode-{source.name}"]
            numbers = text.get("documents", 0), text["sentences"], made["tokens"], made.get("unknown", 0)
            files.append((source.split, source.language, source.path.name, *numbers))
        headers = ("split", "language", "file", "documents", "sentences", "tokens", "unknown")
        lines = [table(files, headers)]
        if len({source.language for source in self.sources}) > 1:
            rows = [(name, *one.values()) for name, one in languages.items()]
            lines.append(table(rows, ("language", "training sentences", "repetitions")))
        mode = "complete_doc" if args.pack == "none" else "eos"
        lines += [
            self._shards_table(counts),
            f"train with: fairseq-train {':'.join(map(str, self.shards))} --task masked_lm "
            f"--sample-break-mode {mode} --tokens-per-sample {args.tokens_per_sample} ...",
        ]
        return [
            Report(
                {f"{source.name}:{source.path.name}": source.path for source in self.sources},
                [*self.shards, *([] if args.tokenizer_folder else [self.tokenizer])],
                lines,
                counts,
                {"languages": languages},
                {row[2]: (row[-1], row[-2]) for row in files},
                self.text_lines(),
            )
        ]

    def _shards_table(self, counts: Mapping) -> str:
        """Return a table with a row for each split of each data-bin."""
        headers = ("data", "documents", "blocks", "tokens", "sentences cut", "blocks full")
        room, packed = self.args.tokens_per_sample - 1, self.args.pack != "none"
        rows = []
        for shard in self.shards:
            found = counts[f"assemble-{shard.name}"]
            for split in ("train", "valid"):
                if f"{split}_blocks" in found:
                    values = [found[f"{split}_{name}"] for name in NUMBERS]
                    full = (f"{values[2] / values[1] / room:.0%}",) if packed else ()
                    rows.append((f"{shard.name}/{split}", *values, *full))
        return table(rows, headers if packed else headers[:-1])
