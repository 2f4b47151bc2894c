"""fairseq's beam search, which reads a few candidates of each hypothesis and evaluates many steps at a time.

fairseq passes over the log-probabilities of all units seven times a step, and a step of a small model takes less than
the loop around it.  A search takes at most twice its beam of them, and treats three units by name: padding, `</s>` and
`<unk>`.  So the kernel finds the first units of the vocabulary, these three among them, and the best others, chooses
among them, and evaluates the steps between two of which the decoder prepares anew: it has room for 32, 64, 128, ...
tokens.  Where the kernel does not evaluate a decoder's layers as a whole, or attention is asked for, each step is the
decoder's own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.search import BeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor

from relpos_fairseq.attention.native import candidates as kernel
from relpos_fairseq.attention.native.search import Ended, Search, Steps
from relpos_fairseq.models.decoder import RelPosDecoder
from relpos_fairseq.models.encoder import RelPosEncoder
from relpos_fairseq.models.prepared_steps import prepared_steps, take_back
from relpos_fairseq.nn.packed import for_kernel, is_plain

NO_LAYER = -1  # whose attention over the source is kept
SELECTS = "reorder_encoder_out"  # of an encoder, which knows that rows share a source
SCORES = ("output_layer", "get_normalized_probs")  # of a model or decoder, in whose place an instance may have others
MOST_NAMED = 16  # units up to the last that a search names: more of them would be as wide as a vocabulary
_weighs = ContextVar("relpos_weighs", default=True)


@contextlib.contextmanager
def attention_unread() -> Iterator[None]:
    """Leave attention out of what searches in the `with` block find: nobody reads it."""
    token = _weighs.set(False)
    try:
        yield
    finally:
        _weighs.reset(token)


def longest(generator: SequenceGenerator, net_input: dict[str, Any]) -> int | None:
    """Return how many units the longest hypothesis may have, `</s>` not counted; None: there are no source tokens."""
    source = net_input.get("src_tokens")
    if source is None:
        return None
    if generator.match_source_len:
        return int(_lengths(generator, net_input).max())
    return min(int(generator.max_len_a * source.size(1) + generator.max_len_b), generator.max_len - 1)


def serves(
    generator: SequenceGenerator,
    sample: dict[str, Any],
    prefix: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
) -> bool:
    """Return whether `search` finds what a generator does for a batch, by the arguments of its `_generate`."""
    source = sample["net_input"].get("src_tokens")
    if source is None or source.dim() != 2:
        return False
    named = _named(generator)
    reads_all = (
        type(generator) is not SequenceGenerator
        or type(generator.search) is not BeamSearch
        or prefix is not None
        or constraints is not None
        or generator.lm_model is not None
        or generator.repeat_ngram_blocker is not None
        or generator.token_indices_to_suppress is not None
        or not _may_begin(generator, bos_token)
        or generator.min_len < 0  # so may the greatest length be
        or named > MOST_NAMED
        or named + 2 * generator.beam_size > generator.vocab_size
    )
    return not reads_all and _is_served(generator.model)


def _may_begin(generator: SequenceGenerator, bos_token: Any) -> bool:
    """Return whether hypotheses may begin by a token: one unit of the vocabulary, but padding, which hides keys."""
    if torch.is_tensor(bos_token) and bos_token.dim():
        return False
    return bos_token is None or (bos_token != generator.pad and 0 <= bos_token < generator.vocab_size)


def _named(generator: SequenceGenerator) -> int:
    """Return how many first units a vocabulary has up to the last that a search names."""
    return int(max(generator.pad, generator.unk, generator.eos)) + 1


def _is_served(ensemble: EnsembleModel) -> bool:
    """Return whether the log-probabilities are those of one decoder of ours, and the kernel can read its scores."""
    model = ensemble.single_model
    decoder, encoder = (getattr(model, side, None) for side in ("decoder", "encoder"))
    if ensemble.models_size > 1 or not isinstance(decoder, RelPosDecoder) or decoder.adaptive_softmax is not None:
        return False
    is_softmax = type(model).get_normalized_probs.__module__.split(".")[0] in ("fairseq", "relpos_fairseq")
    as_known = is_softmax and all(vars(part).keys().isdisjoint(SCORES) for part in (model, decoder))
    selects = encoder is None or getattr(type(encoder), SELECTS, None) is getattr(RelPosEncoder, SELECTS)
    if type(ensemble) is not EnsembleModel or not as_known or not selects:
        return False
    like = next(decoder.parameters())
    return not torch.is_autocast_enabled("cpu") and kernel.serves(like.detach().reshape(1, -1)[:, :1])


def search(generator: SequenceGenerator, sample: dict[str, Any], bos_token: int | None = None) -> list[list[dict]]:
    """Return what fairseq's `_generate` returns for a batch for which `serves` is True.

    Args:
        generator: fairseq's.
        sample: as for fairseq.
        bos_token: by which hypotheses begin; None: `</s>`.
    """
    net_input = sample["net_input"]
    most = longest(generator, net_input)
    assert most is not None and generator.min_len <= most, "min_len cannot be larger than max_len, please adjust these!"
    decoding = Decoding(generator, net_input)
    found = Search(
        len(net_input["src_tokens"]),
        generator.beam_size,
        _named(generator),
        begin=generator.eos if bos_token is None else bos_token,
        pad=generator.pad,
        unk=generator.unk,
        eos=generator.eos,
        min_len=math.ceil(generator.min_len),
        max_len=most,
        unk_penalty=generator.unk_penalty,
    )
    is_done = False
    while not is_done:
        steps = decoding.prepared(found.tokens, most + 1)
        if steps is None:
            is_done = found.choose(*decoding.step(found.tokens))
        else:
            is_done = found.advance(steps)
        if not is_done:
            decoding.select(found.order, None if steps is None else found.places)
    ended = found.ended()
    limits = _lengths(generator, net_input).tolist() if generator.match_source_len else [math.inf] * len(ended)
    return [
        _by_score([_hypothesis(generator, one, decoding.attention, limit) for one in hypotheses])
        for hypotheses, limit in zip(ended, limits, strict=True)
    ]


class Decoding:
    """What a generator's model has read of a batch's sources and of its hypotheses.

    Args:
        generator: for which `serves` is True.
        net_input: the batch.

    Attributes:
        attention: of each step, (rows, S), where it is asked for.
    """

    def __init__(self, generator: SequenceGenerator, net_input: dict[str, Tensor]) -> None:
        self.attention: list[Tensor] = []
        self._generator, self._model = generator, generator.model.single_model
        self._decoder = self._model.decoder
        self._weighs = _weighs.get()
        self._state: dict = {}
        encoder = getattr(self._model, "encoder", None)
        self._source = None if encoder is None else encoder.forward_torchscript(net_input)
        rows = torch.arange(len(net_input["src_tokens"])).repeat_interleave(generator.beam_size)
        self._select_sources(rows, cached=False)

    def prepared(self, tokens: Tensor, most: int) -> Steps | None:
        """Return the steps from the one that reads the last of `tokens` (rows, T) on; None: it is for `step`."""
        if self._weighs:
            return None
        return prepared_steps(self._decoder, tokens, self._source, self._state, self._generator.temperature, most)

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates that a search reads of hypotheses (rows, T): log-probabilities in fp32, and units."""
        decoder, generator = self._decoder, self._generator
        apart = type(decoder).output_layer is TransformerDecoderBase.output_layer
        asked = {} if self._weighs else {"alignment_layer": NO_LAYER}
        x, extra = decoder(
            tokens, encoder_out=self._source, incremental_state=self._state, features_only=apart, **asked
        )
        x = x[:, -1]
        projection = for_kernel(decoder.output_projection) if apart and is_plain(x) else None
        if apart and projection is None:
            x = decoder.output_layer(x)
        best = 2 * generator.beam_size
        log_probs, units = kernel.candidates(x, _named(generator), best, generator.temperature, projection)
        if self._weighs and extra["attn"][0] is not None:
            self.attention.append(extra["attn"][0][:, -1].float())
        return log_probs.float(), units

    def select(self, order: Tensor, places: Tensor | None) -> None:
        """Select rows (rows',) after a step; after prepared ones `places` (rows', T) is where their keys lie."""
        if places is not None:
            take_back(self._decoder, self._state, places, order)
        else:
            self._decoder.reorder_incremental_state_scripting(self._state, order)
        self._select_sources(order, cached=True)

    def _select_sources(self, order: Tensor, cached: bool) -> None:
        """Select rows of the encoder's output; with `cached`, of what layers have read, the sources' numbers alone."""
        if self._source is not None:
            self._source = self._model.encoder.reorder_encoder_out(self._source, order, cached=cached)


def _lengths(generator: SequenceGenerator, net_input: dict[str, Tensor]) -> Tensor:
    """Return the lengths of sources (B,), as fairseq counts them."""
    source = net_input["src_tokens"]
    return net_input.get("src_lengths", (source.ne(generator.eos) & source.ne(generator.pad)).sum(1))


def _hypothesis(generator: SequenceGenerator, found: Ended, attention: list[Tensor], limit: float) -> dict[str, Tensor]:
    """Return fairseq's description of a hypothesis; one of more than `limit` units and `</s>` is the least likely."""
    score = found.sums[-1:].clone()
    length = len(found.units)
    if generator.normalize_scores:
        score /= length**generator.len_penalty
    if length - 1 > limit:
        score.fill_(-math.inf)
    weights = [of_step[row] for of_step, row in zip(attention, found.rows.tolist(), strict=False)]
    return {
        "tokens": found.units,
        "score": score[0],
        "attention": torch.stack(weights, dim=1) if weights else torch.empty(0),
        "alignment": torch.empty(0),
        "positional_scores": torch.cat([found.sums[:1], found.sums[1:] - found.sums[:-1]]),
    }


def _by_score(found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    order = torch.tensor([float(one["score"]) for one in found]).sort(descending=True)[1]
    return [found[place] for place in order]
