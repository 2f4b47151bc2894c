"""The first step of beam search is evaluated once a sentence, and the steps after it read what it left."""

from __future__ import annotations

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from helpers.lm_models import randomized
from helpers.models import batch, small_model, small_task
from relpos_fairseq.models.decoder import RelPosDecoder
from relpos_fairseq.schemes import REGISTER, scheme_names


def search(model, beam: int, **options):
    """Hypotheses of five sentences, two of them equal, and the rows of each step."""
    rows, original = [], type(model.decoder.layers[0]).forward

    def watched(layer, x, *given, **how):
        rows.append(x.size(1))
        return original(layer, x, *given, **how)

    source, _ = batch(rows=5)
    source[3] = source[4]
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    words = small_task().target_dictionary
    generator = SequenceGenerator([model], words, beam_size=beam, max_len_b=12, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.decoder.layers[0]), "forward", watched)
        found = generator.generate([model], sample)
    return found, rows[:: len(model.decoder.layers)]


@pytest.mark.parametrize("scheme", [name for name in scheme_names() if name not in ("mix",)])
@torch.no_grad()
def test_once_a_sentence(scheme, monkeypatch):
    """Tokens, scores and alignments are those of all rows."""
    sides = {"position_scheme": scheme}
    if REGISTER[scheme].causal_only:
        sides = {"position_scheme": "none", "decoder_position_scheme": scheme}
    model = randomized(small_model(**sides)).double().eval()
    found, rows = search(model, 4)
    assert rows[0] == 5 and rows[1] == 20
    monkeypatch.setattr(RelPosDecoder, "_equal_rows", lambda *_: 1)
    expected, rows = search(model, 4)
    assert rows[0] == 20
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist()
            for part in ("positional_scores", "attention"):
                torch.testing.assert_close(one[part], other[part], rtol=0, atol=1e-9)


@torch.no_grad()
def test_rows_that_differ_are_all_evaluated():
    """Tokens that differ, dropout in inference, a search that has begun."""
    model = small_model().double().eval()
    source, _ = batch(rows=2)
    sources = model.encoder.reorder_encoder_out(model.encoder(source), torch.tensor([0, 0, 1, 1]))
    decoder, tokens = model.decoder, torch.full((4, 1), 2)
    assert decoder._equal_rows(tokens, sources, {}) == 2
    assert decoder._equal_rows(torch.tensor([[2], [3], [2], [2]]), sources, {}) == 1
    assert decoder._equal_rows(tokens, sources, None) == 1
    assert decoder._equal_rows(tokens, model.encoder(source), {}) == 1
    state: dict = {}
    decoder(tokens, sources, state)
    assert decoder._equal_rows(tokens, sources, state) == 1
    decoder.layers[0].dropout_module.train()
    assert decoder._equal_rows(tokens, sources, {}) == 1
    decoder.eval().layers[1].dropout_module.apply_during_inference = True
    assert decoder._equal_rows(tokens, sources, {}) == 1


@torch.no_grad()
def test_one_hypothesis_a_sentence():
    model = small_model().double().eval()
    assert set(search(model, 1)[1]) <= {5, 4, 3, 2, 1}
