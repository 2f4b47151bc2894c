"""Prepare plain text for masked language models."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import Hashes, atomic_folder, open_text_out, read_json, write_json, write_text
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress, table
from relpos_fairseq.io.stages import Stage, write_manifest
from relpos_fairseq.preparation.binarise import warn_of_unknown, write_indexed
from relpos_fairseq.preparation.documents import Encoded, copies, encode_file, pack, repetitions, shares, uniform
from relpos_fairseq.preparation.pipeline import Preparation
from relpos_fairseq.preparation.settings import TextFile, read_stream
from relpos_fairseq.text import train_tokenizer
from relpos_fairseq.text.assets import Vocabulary, tokenizer_files
from relpos_fairseq.text.dictionary import EOS

# ---- The names of all files that a preparation makes, and the counts in one of them.


class MlmFiles:
    """Where the stages put what they make.

    Args:
        args: the command line, checked.

    Attributes:
        work: folder of what is only needed on the way.
        tokenizer: folder of the tokenizer.
        shards: the data-bins.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.work = args.out / "work"
        self.counts_file = self.work / "counts.json"
        self.text = self.work / "tokenizer.txt"
        self.tokenizer = args.tokenizer_folder or args.out / "tokenizer"
        data = args.out / "data-bin"
        several = args.shards > 1
        self.shards = [data / f"shard{n}" for n in range(args.shards)] if several else [data]

    def encoded(self, source: TextFile) -> list[Path]:
        """Return the encoded text of a file and its index."""
        return [self.work / f"{source.name}{ending}" for ending in (".bin", ".idx")]

    def sentences(self) -> dict[str, int]:
        """Training sentences of every language."""
        counts, totals = read_json(self.counts_file), Counter()
        for source in self.args.sources:
            if source.split == "train":
                totals[source.language] += counts[source.name]["sentences"]
        return dict(totals)


# ---- The manifest and the tables: what was made, and how fairseq reads it.


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


# ---- The stages of relpos prepare mlm: count, sample, train the tokenizer, encode, assemble.


BLOCK = 1 << 16  # random numbers that are drawn at a time


class MlmPreparation(Preparation):
    """Plain text to data-bins for masked_lm."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args.out)
        self.args = args
        self.files = MlmFiles(args)

    def report(self, counts: Mapping[str, Mapping], command: Sequence[str]) -> None:
        write_report(self.files, counts, command, self.hashes)

    def stages(self) -> list[Stage]:
        args = self.args
        reading = vars(args.reading)
        sources = args.sources
        described = [[source.name, source.language] for source in sources]
        paths = [source.path for source in sources]
        stages = [
            Stage("count", self.count, paths, [self.files.counts_file], {"reading": reading, "sources": described})
        ]
        if args.tokenizer_folder is None:
            stages += self._tokenizer_stages(reading)
        tokenizer = [self.files.tokenizer]
        if args.tokenizer_folder:
            tokenizer = tokenizer_files(self.files.tokenizer)
        stages += [
            Stage(
                f"encode-{source.name}",
                lambda source=source: self.encode(source),
                [source.path, *tokenizer],
                self.files.encoded(source),
                {"reading": reading},
            )
            for source in sources
        ]
        encoded = [file for source in sources for file in self.files.encoded(source)]
        names = ("alpha", "pack", "tokens_per_sample", "shards", "seed")
        parameters = {name: getattr(args, name) for name in names} | {"sources": described}
        parameters["hold_out"] = None if args.valid else args.hold_out
        return stages + [
            Stage(
                f"assemble-{shard.name}",
                lambda number=number: self.assemble(number),
                [self.files.counts_file, *tokenizer, *encoded],
                [shard],
                parameters | {"shard": number},
            )
            for number, shard in enumerate(self.files.shards)
        ]

    def _tokenizer_stages(self, reading: dict) -> list[Stage]:
        args = self.args
        paths = [source.path for source in args.sources if source.split == "train"]
        chosen = {"sentences": args.tokenizer_sentences, "alpha": args.alpha, "seed": args.seed}
        trained = {name: getattr(args, name) for name in ("tokenizer", "vocab_size", "lowercase", "character_coverage")}
        return [
            Stage(
                "sample",
                self.sample,
                [self.files.counts_file, *paths],
                [self.files.text],
                {"reading": reading} | chosen,
            ),
            Stage("tokenizer", self.train_tokenizer, [self.files.text], [self.files.tokenizer], trained),
        ]

    def count(self) -> dict[str, int]:
        """Count every file's documents and sentences."""
        reading = self.args.reading

        def count_one(source: TextFile) -> Counter:
            counts = Counter()
            for _ in read_stream(source.path, reading, counts):
                pass
            return counts

        sources = self.args.sources
        found = list(
            progress(
                ordered_map(count_one, sources, self.args.workers),
                total=len(sources),
                description="count",
                unit="files",
            )
        )
        for source, counts in zip(sources, found, strict=True):
            if not counts["sentences"]:
                raise UserError(f"{source.path} has no text")
        write_json(
            self.files.counts_file, {source.name: dict(counts) for source, counts in zip(sources, found, strict=True)}
        )
        return dict(sum(found, Counter()))

    def sample(self) -> dict[str, int]:
        """Write the tokenizer's text: every language by its share raised to alpha."""
        sentences = self.files.sentences()
        wanted = min(self.args.tokenizer_sentences, sum(sentences.values()))
        factors = {
            language: share * wanted / sentences[language]
            for language, share in shares(sentences, self.args.alpha).items()
        }
        counts = Counter()
        with open_text_out(self.files.text) as file:
            for source in self.args.sources:
                if source.split == "train":
                    for line in self._sampled(source, factors[source.language]):
                        counts[source.language] += 1
                        file.write(f"{line}\n")
        if not counts:
            raise UserError("--tokenizer-sentences is too small: no sentence was sampled")
        return dict(counts)

    def _sampled(self, source: TextFile, factor: float) -> Iterator[str]:
        """A file's sentences, each as often as its own random number says."""
        stream = (item for item in read_stream(source.path, self.args.reading) if item)
        number, times = 0, np.empty(0, np.int64)
        for sentence in stream:
            if number % BLOCK == 0:
                numbers = np.arange(number, number + BLOCK)
                times = copies(factor, uniform(self.args.seed, f"text:{source.name}", numbers))
            for _ in range(int(times[number % BLOCK])):
                yield sentence
            number += 1

    def train_tokenizer(self) -> dict[str, int]:
        """Train the tokenizer on the sample."""
        args = self.args
        options = {"lowercase": True} if args.lowercase else {}
        if args.character_coverage:
            options["character_coverage"] = args.character_coverage
        with atomic_folder(self.files.tokenizer) as temporary:
            trained = train_tokenizer(
                args.tokenizer, temporary, vocab_size=args.vocab_size, files=[self.files.text], **options
            )
        return {"symbols": len(trained.symbols)}

    def encode(self, source: TextFile) -> dict[str, int]:
        """Encode one file."""
        vocabulary = Vocabulary(self.files.tokenizer)
        prefix = self.files.work / source.name
        return encode_file(source.path, prefix, vocabulary, self.args.reading, self.args.workers)

    def assemble(self, number: int) -> dict[str, int]:
        """Write one data-bin; the validation text is in the first."""
        vocabulary = Vocabulary(self.files.tokenizer)
        counts = Counter()
        with atomic_folder(self.files.shards[number]) as folder:
            for split in ("train", "valid") if number == 0 else ("train",):
                found = self._write(folder / split, split, number, vocabulary.size)
                counts.update({f"{split}_{name}": value for name, value in found.items()})
            self._write_vocabulary(folder, vocabulary)
        return dict(counts)

    def _write(self, prefix: Path, split: str, shard: int, vocab_size: int) -> Counter:
        counts = Counter(dict.fromkeys(("documents", "blocks", "tokens", "split_sentences"), 0))
        documents = progress(self._documents(split, shard, counts), description=f"assemble {split}", unit="documents")
        items = pack(documents, self.args.pack, self.args.tokens_per_sample, EOS, counts)
        write_indexed(prefix, items, vocab_size)
        if not counts["blocks"]:
            raise UserError(self._nothing(split))
        return counts

    def _documents(self, split: str, shard: int, counts: Counter) -> Iterator[list[np.ndarray]]:
        factors = repetitions(self.files.sentences(), self.args.alpha)
        for source in self.args.sources:
            encoded = Encoded(self.files.work / source.name)
            chosen = self.choose(source, len(encoded.spans), split, shard, factors)
            counts["documents"] += len(chosen)
            yield from encoded.documents(chosen)

    def choose(self, source: TextFile, count: int, split: str, shard: int, factors: dict[str, float]) -> np.ndarray:
        """Numbers of a file's documents in a split of a shard, a repeated one several times.

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

    def _nothing(self, split: str) -> str:
        if split == "valid":
            return (
                f"--hold-out {self.args.hold_out} left no document for validation: raise it, say "
                "with --documents what a document is, or give --valid"
            )
        return (
            f"a shard has no text: there are fewer training documents than --shards "
            f"{self.args.shards}; use fewer, or say with --documents what a document is"
        )

    def _write_vocabulary(self, folder: Path, vocabulary: Vocabulary) -> None:
        """The tokenizer's files, and which symbols begin a word (for --mask-whole-words)."""
        for file in tokenizer_files(vocabulary.folder):
            shutil.copyfile(file, folder / file.name)
        starts = "".join(f"{int(flag)}\n" for flag in vocabulary.word_starts())
        write_text(folder / "word_starts.txt", starts)
