"""One scheme of the quickstart: training, translation, scores, pictures."""

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from relpos_fairseq.comparison.quickstart.corpus import Corpus
from relpos_fairseq.comparison.quickstart.recipe import (
    GENERATE,
    TRAIN,
    TRAIN_ON_USER_DATA,
    as_arguments,
)
from relpos_fairseq.engine.files import read_json, write_json, write_text
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.tools import (
    USER_DIR,
    ToolError,
    find_tool,
    key_of,
    run_tool,
)

LOG_LINE = re.compile(r"\| INFO \| (train_inner|train|valid) \| (\{.*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
SPEED = re.compile(r"Translated .*, ([\d.]+) tokens/s\)")
SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True)
class Settings:
    """What the user chose for all schemes.

    Attributes:
        out: The output folder.
        max_update: Updates of training.
        minutes: An upper limit for the training of one scheme; None sets none.
        seed: The random seed.
        threads: Threads to compute with.
    """

    out: Path
    max_update: int
    minutes: float | None
    seed: int
    threads: int


@dataclass
class Progress:
    """Shows a training log's lines sparsely and keeps the numbers the table needs."""

    max_update: int
    parameters: int = 0
    speeds: list[float] = field(default_factory=list)
    epoch_speed: float = 0.0
    valid: list[tuple[float, float]] = field(default_factory=list)
    shown_at: float = field(default_factory=time.monotonic)

    def read(self, line: str, show: bool = True) -> None:
        """Takes one line of fairseq-train's output with --log-format json."""
        if match := PARAMETERS.search(line):
            self.parameters = int(match.group(1).replace(",", ""))
        match = LOG_LINE.search(line)
        if match is None:
            return
        kind, values = match.group(1), json.loads(match.group(2))
        if kind == "valid":
            self.valid.append((float(values["valid_loss"]), float(values["valid_ppl"])))
            return
        if kind == "train":  # an epoch's end
            self.epoch_speed = float(values["train_wps"])
            return
        self.speeds.append(float(values["wps"]))
        now = time.monotonic()
        if show and now - self.shown_at >= SECONDS_BETWEEN_LINES:
            self.shown_at = now
            valid = f"  valid ppl {self.valid[-1][1]:.2f}" if self.valid else ""
            print(
                f"  update {values['num_updates']}/{self.max_update}  train ppl {values['ppl']}"
                f"{valid}  {self.speeds[-1]:,.0f} tokens/s",
                flush=True,
            )


@dataclass
class Run:
    """One scheme on one corpus; every finished stage leaves a stamp and is not repeated."""

    scheme: str
    corpus: Corpus
    settings: Settings

    def __post_init__(self) -> None:
        """Names the run's folder by its settings, so that other settings never meet its files."""
        chosen = self.settings
        recipe = TRAIN | (TRAIN_ON_USER_DATA if self.corpus.subwords else {})
        self.flags = recipe | {
            "--position-scheme": self.scheme,
            "--max-update": chosen.max_update,
            "--total-num-update": chosen.max_update,
            "--seed": chosen.seed,
        }
        if chosen.minutes is not None:
            self.flags["--stop-time-hours"] = chosen.minutes / 60
        key = key_of([self.flags, GENERATE, self.corpus.key])
        name = re.sub(r"[^\w+.-]", "_", self.scheme)
        self.folder = chosen.out / "runs" / f"{name}-{key}"
        self.checkpoints = self.folder / "checkpoints"

    def finish(self) -> dict:
        """Trains, translates, scores and draws what is not done yet; returns the table's row."""
        print(f"\n{self.scheme}: {self.folder}", flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        row = {"scheme": self.scheme} | self.stage("train", self.train)
        for index, name in enumerate(self.corpus.tests):
            row[name] = self.stage(name, lambda name=name, i=index: self.translate(name, i))
        spent = [row["train_seconds"], *(row[name]["seconds"] for name in self.corpus.tests)]
        row["seconds"] = round(sum(spent), 1)
        self.draw()
        return row

    def stage(self, name: str, work: Callable[[], dict]) -> dict:
        """Does a stage's work, or reads what it left when it was done."""
        stamp = self.folder / f"{name}.json"
        result = read_json(stamp)
        if result is None:
            result = work()
            write_json(stamp, result)
        else:
            print(f"  {name}: done before", flush=True)
        return result

    def train(self) -> dict:
        """Trains to the end; an interrupted training continues from its last checkpoint."""
        command = self.command(
            "fairseq-train",
            *("--save-dir", str(self.checkpoints), "--log-format", "json", "--log-interval", "20"),
            *as_arguments(self.flags),
        )
        log = self.folder / "train.log"
        begun = (self.checkpoints / "checkpoint_last.pt").exists()
        doing = "training continues from checkpoint_last.pt" if begun else "training"
        print(f"  {doing}, log: {log}", flush=True)
        progress = Progress(self.settings.max_update)
        self.timed(lambda: run_tool(command, log, self.settings.threads, progress.read))
        whole = Progress(self.settings.max_update)
        for line in read_lines(log):
            whole.read(line, show=False)
        if not whole.valid:
            raise ToolError(f"fairseq-train ended without training; see {log}")
        return {
            "valid_ppl": min(whole.valid)[1],
            "parameters": whole.parameters,
            "train_tokens_per_second": round(
                statistics.median(whole.speeds or [whole.epoch_speed])
            ),
            "train_seconds": round(sum(map(float, read_lines(self.folder / "train.seconds"))), 1),
        }

    def timed(self, work: Callable[[], None]) -> None:
        """Does the work and notes its seconds, also when it is interrupted."""
        start = time.monotonic()
        try:
            work()
        finally:
            with (self.folder / "train.seconds").open("a", encoding="utf-8") as file:
                file.write(f"{time.monotonic() - start:.1f}\n")

    def command(self, tool: str, *more: str) -> list[str]:
        """Returns a fairseq command on the corpus with the plugin loaded."""
        corpus = self.corpus
        return [
            *(find_tool(tool), str(corpus.binary)),
            *("--user-dir", str(USER_DIR), "--task", "translation"),
            *("--source-lang", corpus.source, "--target-lang", corpus.target),
            *more,
        ]

    def translate(self, name: str, index: int) -> dict:
        """Translates a test set with the best checkpoint and scores it.

        Args:
            name: The test set.
            index: Its number among the test sets; fairseq calls them test, test1, ...
        """
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        command = self.command(
            "fairseq-generate",
            *("--path", str(self.checkpoints / "checkpoint_best.pt")),
            *("--gen-subset", f"test{index or ''}"),
            *(("--post-process", "sentencepiece") if self.corpus.subwords else ()),
            *as_arguments(GENERATE),
        )
        start = time.monotonic()
        run_tool(command, log, self.settings.threads)
        seconds = time.monotonic() - start
        return self.evaluate(name, log) | {"seconds": round(seconds, 1)}

    def evaluate(self, name: str, log: Path) -> dict:
        """Scores the translations in a log and writes them, in the order of the test set.

        Raises:
            ToolError: Fewer or more sentences came out than went in.
        """
        sources, references = (list(read_lines(path)) for path in self.corpus.tests[name])
        found, speed = read_translations(log)
        if sorted(found) != list(range(len(sources))):
            raise ToolError(f"{len(sources)} sentences went in, {len(found)} came out; see {log}")
        translations = [found[number] for number in range(len(sources))]
        text = "".join(f"{line}\n" for line in translations)
        write_text(self.folder / f"{name}.{self.corpus.target}", text)
        bleu, signature = score(translations, references, self.corpus.subwords)
        return {
            "bleu": bleu,
            "signature": signature,
            "tokens_per_second": speed,
            "sentences": len(sources),
            "samples": list(zip(sources, references, translations, strict=True))[:3],
        }

    def draw(self) -> None:
        """Draws what the scheme learned; a failure is shown and costs nothing else."""
        pictures = self.folder / "pictures"
        if (stamp := self.folder / "pictures.json").exists():
            return
        command = [
            sys.executable,
            "-m",
            "relpos_fairseq.cli.plot_positions",
            str(self.checkpoints / "checkpoint_best.pt"),
        ]
        command += ["--data", str(self.corpus.binary), "--out", str(pictures)]
        try:
            run_tool(command, self.folder / "pictures.log", self.settings.threads)
        except ToolError as error:
            print(f"  no pictures: {error}", flush=True)
            return
        write_json(stamp, {"out": str(pictures)})
        print(f"  pictures: {pictures}", flush=True)


def read_translations(log: Path) -> tuple[dict[int, str], float]:
    """Reads fairseq-generate's output.

    Returns:
        Each sentence's translation by its number in the test set, and target tokens a second.
    """
    found, speed = {}, 0.0
    for line in read_lines(log):
        if line.startswith("D-"):
            number, _, text = line.split("\t", 2)
            found[int(number[2:])] = text
        elif match := SPEED.search(line):
            speed = float(match.group(1))
    return found, speed


def score(translations: list[str], references: list[str], subwords: bool) -> tuple[float, str]:
    """Returns BLEU and its signature; the built-in corpus is tokenised already."""
    import sacrebleu

    metric = sacrebleu.BLEU(tokenize="13a" if subwords else "none", force=not subwords)
    result = metric.corpus_score(translations, [references])
    return round(result.score, 2), str(metric.get_signature())
