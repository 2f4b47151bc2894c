"""The harness's `LM` of a checkpoint: three kinds of request, answered by relpos_fairseq.inference.

Text becomes symbols as in training; every request begins with </s>, which stands before every
stream.  A model with memory reads rolling requests, and long contexts, with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fairseq  # noqa: F401  registers the plugin before checkpoints are opened
from lm_eval.api.model import LM

from relpos_fairseq.inference.checkpoints.causal_lm import (
    Choice,
    Continuation,
    Scorer,
    ids_of,
    open_model,
    sample,
    streamer,
)
from relpos_fairseq.io.progress import progress

DRAWN = 256  # symbols of a request that names no number, as the harness's own models draw
KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed"}


class RelPosLM(LM):
    """A language model's checkpoint.

    Args:
        checkpoint: its file.
        data: data folder, where the checkpoint has no text/ beside it.
        mem_len: tokens of memory; None: as trained.
        context: tokens seen without memory; None: as trained.
        batch_size: requests that are read together.
        device: "cpu", or the GPU where there is one.
        max_batch_size: of the harness; not used.

    Raises:
        ValueError: no checkpoint of a language model, or a length that it has not.
    """

    def __init__(
        self,
        checkpoint: str,
        data: str | None = None,
        mem_len: int | None = None,
        context: int | None = None,
        batch_size: int | str = 16,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit():
            raise ValueError(f"--batch_size {batch_size}: give a number, say 16")
        folder = None if data is None else Path(data)
        self.trained = open_model(Path(checkpoint), folder, device == "cpu")
        self.lengths = {"mem_len": mem_len, "context": context}
        self.scorer = Scorer(self.trained, mem_len, context, int(batch_size))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, whether it is greedy) of each continuation after its context."""
        pairs = [self.scorer.pair(*request.args) for request in requests]
        found = []
        with progress(total=len(pairs), description="scores", unit=" requests") as bar:
            for start in range(0, len(pairs), 64 * self.scorer.rows):
                part = pairs[start : start + 64 * self.scorer.rows]
                found += self.scorer.score(part)
                bar.update(len(part))
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, its first symbol after </s>."""
        pairs = [self.scorer.pair("", *request.args) for request in requests]
        found = [score for score, _ in self.scorer.score(pairs)]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of the texts that end it."""
        found = []
        for request in progress(requests, description="texts", unit=" requests"):
            found.append(self._generate(*request.args))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        """Draw the text that follows a context.

        Raises:
            ValueError: an option that sampling has not.
        """
        if unknown := set(options) - KNOWN:
            raise ValueError(
                f"generation_kwargs {', '.join(sorted(unknown))}: relpos knows "
                f"{', '.join(sorted(KNOWN))}; leave the others out"
            )
        until = options.get("until") or []
        ends = [until] if isinstance(until, str) else list(until)
        choice = Choice(temperature=0)
        if options.get("do_sample", False):
            named = ("temperature", "top_k", "top_p", "seed")
            choice = Choice(**{name: options[name] for name in named if name in options})
        start = Continuation(self.trained, 1, **self.lengths)
        count, text = int(options.get("max_gen_toks", DRAWN)), ""
        show = streamer(self.trained.source, context)
        drawn = sample(start, ids_of(self.trained, context), count, choice)
        for symbol in itertools.chain((one for one, _ in drawn), [None]):
            text += show(None if symbol is None else start.words[int(symbol[0])])
            if places := [text.index(end) for end in ends if end in text]:
                return text[: min(places)]
        return text
