"""Define the harness's `LM` of a checkpoint: three kinds of request, answered by relpos_fairseq.inference.

Text becomes vocabulary entries as in training. Every request begins with </s>, which stands before every stream. A
model with memory reads rolling requests, and long contexts, with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fairseq  # noqa: F401  registers the plugin before checkpoints are opened
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

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

DRAWN = 256  # symbols to sample for a request without max_gen_toks; the harness's own models sample as many
KNOWN = {"until", "max_gen_toks", "max_length", "do_sample", "temperature", "top_k", "top_p", "seed"}
LIMITS = {"max_new_tokens", "max_tokens", "max_completion_tokens"}  # what the harness makes max_gen_toks of


class RelPosLM(LM):
    """A checkpoint of a language model.

    Args:
        checkpoint: its file.
        data: data folder, if the checkpoint's folder has no text/.
        mem_len: tokens of memory; None: as trained.
        context: tokens seen without memory; None: as trained.
        batch_size: requests in a batch.
        device: "cpu", or the GPU where there is one.
        max_batch_size: an argument of the harness, not used.

    Raises:
        ValueError: the checkpoint is of another model, or the model has no such memory or context.
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
        """Return the log-probability of each continuation after its context, and whether it is the greedy one."""
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
        """Return the log-probability of each text, of which the first symbol follows </s>."""
        pairs = [self.scorer.pair("", *request.args) for request in requests]
        found = [score for score, _ in self.scorer.score(pairs)]
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to the first of the texts that end it."""
        found = []
        for request in progress(requests, description="texts", unit=" requests"):
            found.append(self._generate(*request.args))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        """Return a continuation of a context; options have the harness's names and meaning.

        Raises:
            ValueError: an unknown option.
        """
        given = normalize_gen_kwargs({name: value for name, value in options.items() if value is not None}, DRAWN)
        if unknown := set(given) - KNOWN:
            raise ValueError(
                f"generation_kwargs {', '.join(sorted(unknown))}: relpos knows "
                f"{', '.join(sorted(KNOWN | LIMITS))}; leave the others out"
            )
        ends = [end for end in given["until"] if end]  # the harness's own models pass over "" and null too
        if wrong := [end for end in ends if not isinstance(end, str)]:
            raise ValueError(f"generation_kwargs until: a text or a list of texts ends a text, got {wrong[0]!r}")
        choice = Choice(temperature=0)
        if given["do_sample"]:
            named = ("temperature", "top_k", "top_p", "seed")
            choice = Choice(**{name: given[name] for name in named if name in given})
        start = Continuation(self.trained, 1, **self.lengths)
        prompt, count, text = ids_of(self.trained, context), given["max_gen_toks"], ""
        if "max_length" in given:  # of prompt and continuation together, without the </s> before both
            count = max(0, int(given["max_length"]) - len(prompt) + 1)
        show = streamer(self.trained.source, context)
        drawn = sample(start, prompt, count, choice)
        for symbol in itertools.chain((one for one, _ in drawn), [None]):
            text += show(None if symbol is None else start.words[int(symbol[0])])
            if places := [text.index(end) for end in ends if end in text]:
                return text[: min(places)]
        return text
