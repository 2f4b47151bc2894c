"""Texts that a tokenizer is trained on: streamed, counted, readable twice."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from relpos_fairseq.engine.lines import read_lines

logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LOG_LINES = 30.0


class Files:
    r"""The lines of text files that hold anything, read anew each time; only \n ends a line."""

    def __init__(self, files: list[str | Path]):
        self.files = files

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from filter(str.strip, read_lines(path))


class Spool:
    """What an iterator gives, in a temporary file, so that it can be read again."""

    def __init__(self, texts: Iterable[str]):
        self.file = tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n")
        for text in texts:
            self.file.write(" ".join(text.split("\n")) + "\n")

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __iter__(self) -> Iterator[str]:
        self.file.seek(0)
        return (line[:-1] for line in self.file)


class Counted:
    """Texts with progress: a bar on a terminal, a line now and then in a log."""

    def __init__(self, texts: Iterable[str]):
        self.texts = texts
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        from tqdm import tqdm

        last = time.monotonic()
        shown = sys.stderr.isatty()
        for text in tqdm(self.texts, "texts read", unit="", disable=not shown, leave=False):
            self.count += 1
            if not shown and time.monotonic() - last > _SECONDS_BETWEEN_LOG_LINES:
                last = time.monotonic()
                logger.info("tokenizer: %d texts read", self.count)
            yield text

    def require_some(self) -> None:
        """Raise a ValueError if there was no text."""
        if not self.count:
            raise ValueError("no text to train a tokenizer on: every file is empty")
