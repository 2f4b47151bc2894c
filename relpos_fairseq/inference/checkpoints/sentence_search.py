"""Search for the translations of one sentence: fairseq's beam search, whose steps are many at a time.

A step of a small model takes less than fairseq's loop around it.  So the choice among candidates is the kernel's, and
so are the steps between two of which the decoder prepares anew: it has room for 32, 64, 128, ... tokens.  Where the
kernel does not evaluate a decoder's layers as a whole, each step is the decoder's own.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from relpos_fairseq.attention.native.search import Search
from relpos_fairseq.inference.checkpoints.narrow_search import ColumnModel, ColumnSearch
from relpos_fairseq.models.prepared_steps import take_back


def serves(
    generator: SequenceGenerator, sample: dict[str, Any], constraints: Any, bos_token: int | None = None
) -> bool:
    """Return whether a batch is one sentence of tokens, whose attention nobody reads, and its search has columns."""
    source = sample["net_input"].get("src_tokens")
    of_columns = type(generator) is SequenceGenerator and isinstance(generator.model, ColumnModel)
    if not of_columns or source is None or constraints is not None or bos_token == generator.pad:  # keys are hidden
        return False
    return not generator.model.weighs and source.dim() == 2 and len(source) == 1


def search(generator: SequenceGenerator, sample: dict[str, Any], bos_token: int | None = None) -> list[list[dict]]:
    """Return what fairseq's `_generate` returns for a sentence for which `serves` is True.

    Args:
        generator: what `narrow_search.narrowed` returned.
        sample: as for fairseq.
        bos_token: by which hypotheses begin; None: `</s>`.
    """
    model: Any = generator.model
    columns: ColumnSearch = generator.search
    source, beam = sample["net_input"]["src_tokens"], generator.beam_size
    longest = int(generator.max_len_a * source.size(1) + generator.max_len_b)
    longest = min(longest, generator.max_len - 1)
    if generator.match_source_len:
        longest = int(_lengths(generator, sample["net_input"]).max())
    assert generator.min_len <= longest, "min_len cannot be larger than max_len, please adjust these!"
    found = Search(
        beam,
        columns.width - 2 * beam,
        begin=generator.eos if bos_token is None else bos_token,
        pad=generator.pad,
        unk=generator.unk,
        eos=generator.eos,
        min_len=generator.min_len,
        max_len=longest,
        unk_penalty=generator.unk_penalty,
    )
    encoded = model.reorder_encoder_out(model.forward_encoder(sample["net_input"]), torch.zeros(beam, dtype=torch.long))
    states: list[dict] = [{}]
    is_done = False
    while not is_done:
        tokens = found.tokens()
        steps = model.prepared(tokens, encoded, states, generator.temperature, longest + 1)
        if steps is not None:
            is_done = found.advance(steps)
            take_back(model.single_model.decoder, states[0], found.places)
            continue
        log_probs, _ = model.forward_decoder(tokens, encoded, states, generator.temperature)
        is_done = found.choose(log_probs, columns.units)
        if not is_done:
            model.reorder_incremental_state(states, found.order)
    return [_by_score([_hypothesis(generator, *one) for one in found.ended()])]


def _lengths(generator: SequenceGenerator, net_input: dict[str, Tensor]) -> Tensor:
    """Return the lengths of sources (B,), as fairseq counts them."""
    source = net_input["src_tokens"]
    return net_input.get("src_lengths", (source.ne(generator.eos) & source.ne(generator.pad)).sum(1))


def _hypothesis(generator: SequenceGenerator, tokens: Tensor, sums: Tensor) -> dict[str, Tensor]:
    """Return fairseq's description of a hypothesis of units (T,) with sums of log-probabilities (T,)."""
    score = sums[-1:].clone()
    if generator.normalize_scores:
        score /= len(tokens) ** generator.len_penalty
    return {
        "tokens": tokens,
        "score": score[0],
        "attention": torch.empty(0),
        "alignment": torch.empty(0),
        "positional_scores": torch.cat([sums[:1], sums[1:] - sums[:-1]]),
    }


def _by_score(found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    order = torch.tensor([float(one["score"]) for one in found]).sort(descending=True)[1]
    return [found[place] for place in order]
