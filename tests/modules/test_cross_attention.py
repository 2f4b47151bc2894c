"""Attention over the encoder's outputs equals fairseq's, and is kept once a source sentence."""

from __future__ import annotations

import pytest
import torch
from fairseq.modules import MultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import batch, fairseq_model, small_model, small_task
from relpos_fairseq.modules import cross_attention
from relpos_fairseq.modules.cross_attention import SOURCES, CrossAttention, regroup, repeats

EXACT = {"rtol": 0, "atol": 1e-11}
SHAPE = {"kdim": 6, "vdim": 6, "encoder_decoder_attention": True}


def pair(dropout: float = 0.0) -> tuple[MultiheadAttention, CrossAttention]:
    """Fairseq's attention and ours with the same values."""
    torch.manual_seed(1)
    own = CrossAttention(8, 2, dropout=dropout, **SHAPE).double()
    theirs = MultiheadAttention(8, 2, dropout=dropout, **SHAPE).double()
    theirs.load_state_dict(own.state_dict())
    return theirs, own


@pytest.mark.parametrize("weights", [False, "mean", "heads"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_equals_fairseqs(training: bool, padded: bool, weights: bool | str) -> None:
    """Outputs, probabilities and all gradients."""
    results = []
    for module in pair():
        module.train(training)
        generator = torch.Generator().manual_seed(2)
        query, source = (
            torch.randn(n, 3, width, dtype=torch.float64, generator=generator, requires_grad=True)
            for n, width in ((4, 8), (5, 6))
        )
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, :2] = padding[2, 4:] = True
        out, probs = module(
            query,
            source,
            source,
            key_padding_mask=padding if padded else None,
            static_kv=True,
            need_weights=bool(weights),
            need_head_weights=weights == "heads",
        )
        assert (probs is None) == (not weights)
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        if weights:
            loss = loss + (probs * torch.linspace(0, 1, probs.numel()).view_as(probs)).sum()
        wanted = [query, source, *module.parameters()]
        results.append([out, probs, *torch.autograd.grad(loss, wanted, allow_unused=True)])
    for theirs, own in zip(*results, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:  # fairseq's softmax is in fp32 whatever its input
            torch.testing.assert_close(own, theirs.to(own.dtype), rtol=0, atol=2e-6)


def test_dropout_is_fairseqs() -> None:
    """In training probabilities are dropped, and those returned are whole; in evaluation none."""
    _, own = pair(dropout=0.5)
    query, source = torch.randn(4, 3, 8).double(), torch.randn(5, 3, 6).double()
    torch.manual_seed(0)
    one = own(query, source, need_weights=False)[0]
    torch.manual_seed(0)
    other, probs = own(query, source, need_weights=True)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 4).double())
    assert not torch.allclose(one, own(query, source, need_weights=False)[0])
    own.eval()
    torch.testing.assert_close(own(query, source, need_weights=False)[0], own(query, source)[0], **EXACT)


def test_masks_and_logits_are_refused() -> None:
    """What no decoder layer asks for."""
    _, own = pair()
    query, source = torch.randn(4, 3, 8).double(), torch.randn(5, 3, 6).double()
    for asked in ({"attn_mask": torch.zeros(4, 5)}, {"before_softmax": True}):
        with pytest.raises(ValueError, match="takes no attn_mask and gives no logits"):
            own(query, source, **asked)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_regrouping_keeps_every_rows_source(data: st.DataObject) -> None:
    """Any order of rows, beams of a sentence together or not."""
    sources, beams = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):  # beams of some of the sentences
        kept = data.draw(st.lists(st.integers(0, sources - 1), min_size=1, max_size=4))
        order = [s * beams + data.draw(st.integers(0, beams - 1)) for s in kept for _ in range(beams)]
    else:
        order = data.draw(st.lists(st.integers(0, sources * beams - 1), min_size=1, max_size=9))
    order = torch.tensor(order)
    selected, count = regroup(order, beams, sources)
    selected = torch.arange(sources) if selected is None else selected
    assert selected.repeat_interleave(count).tolist() == (order // beams).tolist()


def test_repeats() -> None:
    """Only what every source has in common; nothing where rows are not those of the encoder."""
    assert repeats(torch.tensor([0, 0, 0, 0, 1, 1]), 6) == 2
    assert repeats(torch.tensor([0, 0, 1]), 3) == 1
    assert repeats(torch.tensor([0, 0, 1, 1]), 3) == 1
    assert repeats(None, 3) == 1


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_generation_is_fairseqs(beam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypotheses, scores and alignments, while sentences end at different steps."""
    plain, model = fairseq_model().double(), small_model(position_scheme="sinusoidal").double()
    model.load_state_dict({n: v for n, v in plain.state_dict().items() if "version" not in n}, strict=False)
    kept = []

    def watched(*args: object) -> tuple:
        kept.append(regroup(*args))
        return kept[-1]

    monkeypatch.setattr(cross_attention, "regroup", watched)
    source, _ = batch(rows=5)
    source[3] = source[4]  # a sentence that occurs twice stays two sources
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    found = []
    for one in (plain, model):
        one.double()
        generator = SequenceGenerator(
            [one], small_task().target_dictionary, beam_size=beam, max_len_b=30, unk_penalty=-0.5
        )
        found.append(generator.generate([one], sample))
    for theirs, own in zip(*found, strict=True):
        for hypothesis, other in zip(theirs, own, strict=True):
            assert hypothesis["tokens"].tolist() == other["tokens"].tolist()
            for part in ("positional_scores", "attention"):
                torch.testing.assert_close(other[part], hypothesis[part], rtol=0, atol=1e-5)
    assert all(count == beam for _, count in kept)
    assert any(selected is not None for selected, _ in kept), "no sentence ended before another"
    assert any(selected is None for selected, _ in kept)


@torch.no_grad()
def test_beams_of_a_sentence_are_not_copied() -> None:
    """Permuting equal rows of the encoder's output returns what there is."""
    model = small_model()
    source, _ = batch()
    out = model.encoder(source, None)
    wide = model.encoder.reorder_encoder_out(out, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert model.encoder.reorder_encoder_out(wide, torch.tensor([1, 1, 3, 2, 4, 5])) is wide
    less = model.encoder.reorder_encoder_out(wide, torch.tensor([5, 4, 0, 0]))
    torch.testing.assert_close(less["encoder_out"][0], out["encoder_out"][0][:, [2, 2, 0, 0]])
    assert less["sources"][0].tolist() == [2, 2, 0, 0]


@torch.no_grad()
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_steps_by_the_kernel_are_fairseqs(data: st.DataObject) -> None:
    """Any sources, beams, padding and selections, against fairseq's attention on the sources of each row."""
    plain, own = pair()
    sources, beams, length = (data.draw(st.integers(1, n)) for n in (4, 4, 30))
    key = torch.randn(length, sources, 6).double()
    padding = torch.zeros(sources, length, dtype=torch.bool)
    for row in range(sources):
        padding[row, : data.draw(st.integers(0, length - 1))] = True
    read, state = torch.arange(sources).repeat_interleave(beams), {}
    for _ in range(data.draw(st.integers(1, 4))):
        if state:
            order = torch.tensor(data.draw(st.lists(st.integers(0, len(read) - 1), min_size=1, max_size=9)))
            own.reorder_incremental_state(state, order)
            read = read[order]
        state[SOURCES] = read
        query = torch.randn(1, len(read), 8).double()
        out, _ = own(query, key[:, read], None, padding[read], state, need_weights=False)
        expected, _ = plain(query, key[:, read], key[:, read], padding[read], need_weights=False)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_state_of_another_batch_is_refused() -> None:
    """The kernel is given no row that is not there."""
    _, own = pair()
    key, state = torch.randn(5, 2, 6).double(), {}
    own(torch.randn(1, 2, 8).double(), key, None, None, state, need_weights=False)
    with pytest.raises(ValueError, match="incremental_state holds 2 rows and there are 3 queries: select rows"):
        own(torch.randn(1, 3, 8).double(), None, None, None, state, need_weights=False)
