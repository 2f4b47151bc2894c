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
from relpos_fairseq.engine.errors import ToolError
from relpos_fairseq.engine.files import write_text
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.stages import Stage, run_stages
from relpos_fairseq.engine.tools import USER_DIR, find_tool, key_of, run_tool

LOG_LINE = re.compile(r"\| INFO \| (train_inner|train|valid) \| (\{.*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
SPEED = re.compile(r"Translated .*, ([\d.]+) tokens/s\)")
SECONDS_BETWEEN_LINES = 15.0


@dataclass(frozen=True)
class Choices:
    """What the user chose for all schemes.

    Attributes:
        out: The output folder.
        max_update: Updates of training.
        minutes: An upper limit for the training of one scheme; None sets none.
        seed: The random seed.
        threads: Threads to compute with.

    Raises:
        ValueError: A number is not above 0.
    """

    out: Path
    max_update: int
    minutes: float | None
    seed: int
    threads: int

    def __post_init__(self) -> None:
        for name in ("max_update", "minutes", "threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")


@dataclass
class Progress:
    """Show a training log's lines sparsely and keep the numbers the table needs."""

    max_update: int
    parameters: int = 0
    speeds: list[float] = field(default_factory=list)
    epoch_speed: float = 0.0
    valid: list[tuple[float, float]] = field(default_factory=list)
    shown_at: float = field(default_factory=time.monotonic)

    def read(self, line: str, show: bool = True) -> None:
        """Take one line of fairseq-train's output with --log-format json."""
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
class SchemeRun:
    """One scheme on one corpus."""

    scheme: str
    corpus: Corpus
    choices: Choices

    def __post_init__(self) -> None:
        """Name the run's folder by its settings, so that other settings have other files."""
        chosen = self.choices
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
        """Train, translate, score and draw what is not done yet; returns the table's row."""
        print(f"\n{self.scheme}: {self.folder}", flush=True)
        made = run_stages([self.training(), *self.translations()], self.folder)
        row = {"scheme": self.scheme} | made["train"]
        for name in self.corpus.tests:
            row[name] = made[name]
        spent = [row["train_seconds"], *(row[name]["seconds"] for name in self.corpus.tests)]
        row["seconds"] = round(sum(spent), 1)
        self.draw()
        return row

    def training(self) -> Stage:
        """Return the stage that trains."""
        return Stage("train", self.train, [self.corpus.binary], [self.checkpoints])

    def translations(self) -> list[Stage]:
        """Return the stages that translate and score, one for each test set."""
        return [
            Stage(
                name,
                lambda name=name, index=index: self.translate(name, index),
                [self.checkpoints, self.corpus.binary],
                [self.folder / f"{name}.{self.corpus.target}"],
            )
            for index, name in enumerate(self.corpus.tests)
        ]

    def train(self) -> dict:
        """Train to the end; an interrupted training continues from its last checkpoint."""
        command = self.command(
            "fairseq-train",
            *("--save-dir", str(self.checkpoints), "--log-format", "json", "--log-interval", "20"),
            *as_arguments(self.flags),
        )
        log = self.folder / "train.log"
        begun = (self.checkpoints / "checkpoint_last.pt").exists()
        if not begun:
            for left in (log, self.folder / "train.seconds"):
                left.unlink(missing_ok=True)
        doing = "training continues from checkpoint_last.pt" if begun else "training"
        print(f"  {doing}, log: {log}", flush=True)
        progress = Progress(self.choices.max_update)
        self.timed(lambda: run_tool(command, log, self.choices.threads, progress.read))
        whole = Progress(self.choices.max_update)
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
        """Do the work and note its seconds, also when it is interrupted."""
        start = time.monotonic()
        try:
            work()
        finally:
            with (self.folder / "train.seconds").open("a", encoding="utf-8") as file:
                file.write(f"{time.monotonic() - start:.1f}\n")

    def command(self, tool: str, *more: str) -> list[str]:
        """Return a fairseq command on the corpus with the plugin loaded."""
        corpus = self.corpus
        return [
            *(find_tool(tool), str(corpus.binary)),
            *("--user-dir", str(USER_DIR), "--task", "translation"),
            *("--source-lang", corpus.source, "--target-lang", corpus.target),
            *more,
        ]

    def translate(self, name: str, index: int) -> dict:
        """Translate a test set with the best checkpoint and score it.

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
        run_tool(command, log, self.choices.threads)
        seconds = time.monotonic() - start
        return self.evaluate(name, log) | {"seconds": round(seconds, 1)}

    def evaluate(self, name: str, log: Path) -> dict:
        """Score the translations in a log and write them, in the order of the test set.

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
        """Draw what the scheme learned; a failure is shown and costs nothing else."""
        pictures = self.folder / "pictures"
        command = [sys.executable, "-m", "relpos_fairseq.cli", "plot"]
        command += [str(self.checkpoints / "checkpoint_best.pt")]
        command += ["--data", str(self.corpus.binary), "--out", str(pictures)]
        log, threads = self.folder / "pictures.log", self.choices.threads
        drawing = Stage(
            "pictures", lambda: run_tool(command, log, threads), [self.checkpoints], [pictures]
        )
        try:
            run_stages([drawing], self.folder)
        except ToolError as error:
            print(f"  no pictures: {error}", flush=True)


def read_translations(log: Path) -> tuple[dict[int, str], float]:
    """Read fairseq-generate's output.

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
    """Return BLEU and its signature; the built-in corpus is tokenised already."""
    import sacrebleu

    metric = sacrebleu.BLEU(tokenize="13a" if subwords else "none", force=not subwords)
    result = metric.corpus_score(translations, [references])
    return round(result.score, 2), str(metric.get_signature())
