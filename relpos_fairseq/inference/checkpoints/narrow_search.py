"""Let fairseq's beam search read a few candidates of each hypothesis in place of the whole vocabulary.

fairseq passes over the log-probabilities of all units seven times a step, which takes a third of the time of a small
model.  A search takes at most twice its beam of them, and treats three units by name: padding, `</s>` and `<unk>`.  So
the search is given the first units of the vocabulary, these three among them, and the best others, in columns; the
units that it chooses are numbered as in the vocabulary again.  fairseq's loop runs as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.search import BeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor

from relpos_fairseq.attention.native.candidates import candidates, serves
from relpos_fairseq.attention.native.search import Steps
from relpos_fairseq.models.decoder import RelPosDecoder
from relpos_fairseq.models.prepared_steps import prepared_steps
from relpos_fairseq.nn.packed import for_kernel, is_plain

NO_LAYER = -1  # whose attention over the source is kept
MOST_NAMED = 16  # units up to the last that a search names: more of them would be as wide as a vocabulary


def narrowed(generator: SequenceGenerator, prefix: Tensor | None) -> SequenceGenerator:
    """Return a generator that finds what `generator` finds in less time, or `generator` where there is none.

    Args:
        generator: whose search may begin with a prefix of tokens.
        prefix: that prefix, or None.
    """
    named = max(generator.pad, generator.unk, generator.eos) + 1
    best = 2 * generator.beam_size
    reads_all = (
        type(generator.search) is not BeamSearch
        or prefix is not None
        or generator.lm_model is not None
        or generator.repeat_ngram_blocker is not None
        or generator.token_indices_to_suppress is not None
        or named > MOST_NAMED
        or named + best > generator.vocab_size
    )
    if reads_all or not _is_served(generator.model):
        return generator
    narrow = copy.copy(generator)
    narrow._modules = dict(generator._modules)
    narrow.search = ColumnSearch(generator.tgt_dict, named + best)
    narrow.model = ColumnModel(generator.model.models, named, best, narrow.search)
    narrow.model.weighs = getattr(generator, "weighs", True)
    narrow.vocab_size = named + best
    return narrow


def _is_served(ensemble: EnsembleModel) -> bool:
    """Return whether the log-probabilities are those of one decoder of ours, and the kernel can read its scores."""
    decoder = getattr(ensemble.single_model, "decoder", None)
    if ensemble.models_size > 1 or not isinstance(decoder, RelPosDecoder) or decoder.adaptive_softmax is not None:
        return False
    if type(ensemble) is not EnsembleModel or not _is_known(type(ensemble.single_model)):
        return False
    like = next(decoder.parameters())
    return not torch.is_autocast_enabled("cpu") and serves(like.detach().reshape(1, -1)[:, :1])


def _is_known(kind: Any) -> bool:
    """Return whether a model's probabilities are the softmax of its scores: fairseq's method or this package's."""
    return kind.get_normalized_probs.__module__.split(".")[0] in ("fairseq", "relpos_fairseq")


class ColumnSearch(BeamSearch):
    """Beam search over columns, of which each row has its own.

    Attributes:
        width: columns of a row.
        units: (rows, width) the unit of each, for the step that comes.
    """

    units: Tensor

    def __init__(self, dictionary: Any, width: int) -> None:
        super().__init__(dictionary)
        self.width = width

    def step(self, step: int, lprobs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores, units and beams (B, candidates) for log-probabilities (B, beams, width), as fairseq does."""
        scores, columns, beams = super().step(step, lprobs, *args, **kwargs)
        return scores, self.units.view(len(lprobs), -1).gather(1, beams * self.width + columns), beams


class ColumnModel(EnsembleModel):
    """One model, whose steps give log-probabilities of columns.

    Args:
        models: the one.
        named: first units that every row has.
        best: how many others.
        search: is told the columns' units.
    """

    def __init__(self, models: Sequence[Any], named: int, best: int, search: ColumnSearch) -> None:
        super().__init__(models)
        self._named, self._best, self._search = named, best, search
        self._begun = False  # whether layers have cached what they read of the sources

    def reorder_encoder_out(self, encoder_outs: list | None, new_order: Tensor) -> list:
        """Select rows of the encoder's output, as fairseq does; of what is cached, the numbers of sources alone."""
        if not self._begun or not encoder_outs:
            return super().reorder_encoder_out(encoder_outs, new_order)
        return [self.single_model.encoder.reorder_encoder_out(encoder_outs[0], new_order, cached=True)]

    def prepared(
        self, tokens: Tensor, encoder_outs: list, states: list[dict], temperature: float, most: int
    ) -> Steps | None:
        """Return the steps from the one that reads the last of `tokens` on; None: it is `forward_decoder`'s."""
        encoder_out = encoder_outs[0] if encoder_outs else None
        return prepared_steps(self.single_model.decoder, tokens, encoder_out, states[0], temperature, most)

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: list, incremental_states: list[dict], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities (rows, columns), and attention (rows, S) or None, as fairseq does."""
        encoder_out, decoder = encoder_outs[0] if encoder_outs else None, self.single_model.decoder
        asked = {} if self.weighs else {"alignment_layer": NO_LAYER}
        apart = type(decoder).output_layer is TransformerDecoderBase.output_layer
        x, extra = decoder(
            tokens, encoder_out=encoder_out, incremental_state=incremental_states[0], features_only=apart, **asked
        )
        self._begun = True
        x = x[:, -1]
        projection = for_kernel(decoder.output_projection) if apart and is_plain(x) else None
        if apart and projection is None:
            x = decoder.output_layer(x)
        found, self._search.units = candidates(x, self._named, self._best, temperature, projection)
        attention = extra["attn"][0]
        return found.float(), None if attention is None else attention[:, -1]
