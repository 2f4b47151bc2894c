"""Patch how fairseq-interactive reads lines; README.md says what each patch replaces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.io.lines import lines_of


class Lines(list):
    """Successive lines of the input, of which `first` is the number of the first."""

    first = 1


def buffered_read(original: Callable, input: str, buffer_size: int) -> Iterator[Lines]:
    r"""Let a line feed alone, or after a carriage return, end a line: a lone `\r` would make two sources of one."""
    buffer = Lines()
    for number, line in enumerate(lines_of(Path(input)), start=1):
        buffer.append(line.strip())
        if len(buffer) == buffer_size:
            yield buffer
            buffer = Lines()
            buffer.first = number + 1
    if buffer:
        yield buffer


def make_batches(
    original: Callable, lines: list[str], cfg: Any, task: Any, max_positions: Any, encode_fn: Callable
) -> Iterator[Any]:
    """Cut sources where --truncate-source says so, name lines that are too long, and leave empty ones empty."""
    search, encode = task.inference_step, task.get_interactive_tokens_and_lengths
    batch: Any = None
    longest = max_positions[0] if isinstance(max_positions, tuple) else max_positions

    def encoded(lines: list[str], encode_fn: Callable) -> tuple[Sequence[Any], list[int]]:
        sources, lengths = encode(lines, encode_fn)
        if getattr(cfg.task, "truncate_source", False) and longest:
            sources = [cut(source, int(longest)) if isinstance(source, Tensor) else source for source in sources]
            lengths = [min(length, int(longest)) for length in lengths]
        return sources, lengths

    def searched(generator: Any, models: Sequence[Any], *args: Any, **kwargs: Any) -> list[list[dict[str, Any]]]:
        found = search(generator, models, *args, **kwargs)
        ours = all(type(model).__module__.partition(".")[0] == __name__.partition(".")[0] for model in models)
        for number, hypotheses in zip(batch.ids.tolist(), found, strict=True):
            if ours and hasattr(models[0], "encoder") and not lines[number]:
                for one in hypotheses:
                    one |= {name: torch.zeros_like(one[name]) for name in ("score", "positional_scores")}
                    one |= {name: one[name][-1:] for name in ("tokens", "positional_scores")} | {"alignment": []}
        return found

    task.get_interactive_tokens_and_lengths, task.inference_step = encoded, searched
    try:
        for batch in original(lines, cfg, task, max_positions, encode_fn):
            yield batch
    except Exception as error:
        if not (sample := re.search(r"[Ss]ample #(\d+)", str(error))):
            raise
        number = getattr(lines, "first", 1) + int(sample[1])
        way_out = "; --truncate-source cuts such lines" if "max_positions" in str(error) else ""
        raise ValueError(f"line {number} of the input: {error}{way_out}") from None
    finally:
        del task.get_interactive_tokens_and_lengths, task.inference_step


def cut(source: Tensor, longest: int) -> Tensor:
    """Return the first tokens of a source (T,), and its last, which ends it: at most `longest`."""
    return source if len(source) <= longest else source[[*range(longest - 1), -1]]
