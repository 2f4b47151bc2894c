"""What users call on a loaded model does what it does on transformers' own BERT and GPT-2."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from helpers import twins
from helpers.twins import ANSWERS, CAUSAL, CHOICES, MEMORY, MODEL, SEQ2SEQ, built, drawn
from relpos_fairseq.export import transformers as ours
from relpos_fairseq.schemes import REGISTER, scheme_names

TWO_WAY = [name for name in scheme_names() if not REGISTER[name].causal_only]
pytestmark = pytest.mark.usefixtures("no_grad")


def states_of(found, kind):
    return getattr(found, kind, None) or getattr(found, f"decoder_{kind}")


@pytest.mark.parametrize("normed_before", [False, True])
@pytest.mark.parametrize("cls", twins.EVERY)
def test_hidden_states_and_attentions(cls, normed_before):
    sides = ["encoder"] * hasattr(cls, "stacks") if cls in twins.ENCODERS else ["decoder"]
    model = built(cls, **{f"{side}_normalize_before": normed_before for side in sides})
    given = drawn(cls)
    plain, found = model(**given), model(**given, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(found[0], plain[0], rtol=0, atol=1e-6)
    rows, length = (6, 7) if cls is CHOICES else (2, 5 if cls is SEQ2SEQ else 7)
    hidden, attentions = states_of(found, "hidden_states"), states_of(found, "attentions")
    assert [part.shape for part in hidden] == [(rows, length, 16)] * 3
    assert [part.shape for part in attentions] == [(rows, 2, length, length)] * 2
    for part in attentions:
        torch.testing.assert_close(part.sum(-1), torch.ones(rows, 2, length).double())
    if cls is MODEL:
        assert torch.equal(hidden[-1], found.last_hidden_state)
    if cls is SEQ2SEQ:
        assert [part.shape for part in found.cross_attentions] == [(2, 2, 5, 7)] * 2
        assert [part.shape for part in found.encoder_attentions] == [(2, 2, 7, 7)] * 2
        assert [part.shape for part in found.encoder_hidden_states] == [(2, 7, 16)] * 3
        assert torch.equal(found.encoder_hidden_states[-1], found.encoder_last_hidden_state)
    if cls in twins.LANGUAGE:
        scores = torch.nn.functional.linear(hidden[-1], model.get_output_embeddings().weight)
        torch.testing.assert_close(scores, found.logits)
    for name in ("output_attentions", "output_hidden_states"):
        setattr(model.config, name, True)
    again = model(**given)
    for kind, parts in (("hidden_states", hidden), ("attentions", attentions)):
        assert all(map(torch.equal, states_of(again, kind), parts))
    found = model(**given, output_attentions=False, output_hidden_states=False)
    assert not any(name.endswith(("attentions", "hidden_states")) for name in found)


@pytest.mark.parametrize("scheme", TWO_WAY)
def test_attentions_of_every_scheme(scheme):
    """The fused kernels have none; the outputs beside them are the same."""
    model, given = built(MODEL, scheme), drawn(MODEL)
    given["attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    found = model(**given, output_attentions=True)
    torch.testing.assert_close(found[0], model(**given)[0], rtol=0, atol=1e-5)
    for part in found.attentions:
        assert float(part[1, :, :, 4:].abs().max()) == 0.0
        torch.testing.assert_close(part.sum(-1), torch.ones(2, 2, 7).double())
    # Tokens attend to those where their row of the mask is 1: two halves are two sentences.
    given = drawn(MODEL, 8)
    pairs = torch.block_diag(torch.ones(5, 5), torch.ones(3, 3)).expand(2, 8, 8)
    found = model(**given, attention_mask=pairs, output_attentions=True)
    for part in found.attentions:
        assert float(part[..., :5, 5:].abs().max()) == float(part[..., 5:, :5].abs().max()) == 0.0
    if not REGISTER[scheme].absolute:
        alone = model(given["input_ids"][:, :5])[0]
        torch.testing.assert_close(found[0][:, :5], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(**given, attention_mask=torch.ones(2, 8, 8))[0], model(**given)[0])


def test_attentions_of_a_backend_that_has_none():
    model = built(MODEL, "rope", attention_backend="sdpa")
    given = drawn(MODEL)
    found = model(**given, output_attentions=True)
    torch.testing.assert_close(found[0], model(**given)[0])
    assert model.stacks()[0].layers[0].self_attn.backend == "sdpa"


def test_attentions_over_segments():
    """A model with memory attends over it, and over no token after or beyond."""
    model = built(MEMORY)
    given = drawn(MEMORY, 40)
    found = model(**given, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(found.logits, model(**given).logits)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    far = distance > torch.arange(40)[:, None] % twins.SEGMENT + 20
    for part in found.attentions:
        assert part.shape == (2, 2, 40, 40)
        assert bool((part > 0).eq(~far & (distance >= 0)).all())
        torch.testing.assert_close(part.sum(-1), torch.ones(2, 2, 40).double())
    assert found.hidden_states[-1].shape == (2, 40, 16)
    given["input_ids"][1, 0] = 1
    with pytest.raises(ValueError, match="1 of 2 rows have padding before tokens"):
        model(**given, output_attentions=True)


@pytest.mark.parametrize("cls", twins.EVERY)
def test_return_dict(cls):
    model, given = built(cls), drawn(cls)
    found = model(**given, return_dict=False, output_hidden_states=True)
    expected = model(**given, output_hidden_states=True).to_tuple()
    assert isinstance(found, tuple) and len(found) == len(expected)
    assert torch.equal(found[0], expected[0])
    model.config.return_dict = False
    assert isinstance(model(**given), tuple) and "logits" not in dir(model(**given))
    with pytest.raises(TypeError, match="unexpected keyword argument 'position_id'"):
        model(**given, position_id=1)


@pytest.mark.parametrize("length", [7, 40])
@pytest.mark.parametrize("cls", twins.EVERY)
def test_inputs_embeds(cls, length):
    model, given = built(cls), drawn(cls, length)
    expected = model(**given)[0]
    embeds = {"inputs_embeds": model.get_input_embeddings()(given["input_ids"])}
    if cls is SEQ2SEQ:
        embeds["decoder_inputs_embeds"] = model.model.decoder.embed_tokens(given["decoder_input_ids"])
    torch.testing.assert_close(model(**embeds)[0], expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="both input_ids and inputs_embeds"):
        model(**given, **embeds)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cls", twins.EVERY)
def test_resize_token_embeddings(cls, shared, tmp_path):
    values = {"untie_weights_roberta": not shared} if cls in twins.ENCODERS else {}
    if cls is SEQ2SEQ:
        values = {"share_all_embeddings": shared, "share_decoder_input_output_embed": shared}
    elif cls in twins.LANGUAGE:
        values = {"share_decoder_input_output_embed": shared}
    model, given = built(cls, **values), drawn(cls)
    model.config.tie_word_embeddings = shared
    if cls is SEQ2SEQ and not shared:
        with pytest.raises(ValueError, match="embeddings of their own"):
            model.resize_token_embeddings(30)
        return
    before = model(**given)[0]
    for rows in (30, 20, twins.ROWS + 8):
        assert len(model.resize_token_embeddings(rows).weight) == rows == model.config.vocab_size
    assert len(model.get_output_embeddings().weight) == twins.ROWS + 8
    given["input_ids"][..., -1] = twins.ROWS + 7
    after = model(**given)[0]
    assert after.isfinite().all() and after.shape[:-1] == before.shape[:-1]
    assert after.size(-1) == (twins.ROWS + 8 if before.size(-1) == twins.ROWS else before.size(-1))
    model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path).double().eval()
    torch.testing.assert_close(again(**given)[0], after, rtol=0, atol=1e-5)
    given["input_ids"][..., -1] = 19
    given["input_ids"] = given["input_ids"].clamp(max=19)
    small = model(**given)[0]
    kept = slice(None) if before.size(-1) != twins.ROWS else slice(20)
    if cls is not SEQ2SEQ:
        torch.testing.assert_close(small[..., kept], built(cls, **values)(**given)[0][..., kept])


@torch.enable_grad()
@pytest.mark.parametrize(("cls", "masked"), [*((cls, False) for cls in twins.EVERY), (MODEL, True)])
def test_gradient_checkpointing(cls, masked):
    """Gradients are the same, with attentions and masks of pairs too; layers are run twice."""
    model, given = built(cls).train(), drawn(cls) | ({"attention_mask": torch.ones(2, 7, 7).tril()} if masked else {})
    ran = []
    for stack in model.stacks():
        stack.layers[0].fc1.register_forward_hook(lambda *_: ran.append(1))

    def gradients(**more):
        ran.clear()
        model.zero_grad()
        found = model(**given, **more)
        (found[0] if cls is not ANSWERS else found.start_logits).square().sum().backward()
        return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}, len(ran)

    expected, once = gradients()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    found, twice = gradients()
    assert twice == 2 * once and found.keys() == expected.keys()
    for more in ({}, {"output_attentions": True}, {"output_hidden_states": True}):
        for name, part in gradients(**more)[0].items():
            torch.testing.assert_close(part, expected[name], msg=name)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing and gradients()[1] == once


@pytest.mark.parametrize("cls", twins.EVERY)
def test_masks_that_do_not_fit(cls):
    """Transformers' own error."""
    model, given = built(cls), drawn(cls)
    for shape in ((6,), (7, 6), (1, 7, 7)):
        mask = torch.ones(2, *[3] * (cls is CHOICES), *shape)
        with pytest.raises(ValueError, match="Wrong shape for input_ids .* or attention_mask"):
            model(**given, attention_mask=mask)


def test_positions_of_answers():
    """Those beyond the text do not count, and (B, 1) is (B,), as of BERT."""
    model, given = built(ANSWERS), drawn(ANSWERS)
    start, end = torch.tensor([3, 2]), torch.tensor([4, 6])
    found = model(**given, start_positions=start, end_positions=end)
    taken = [found.start_logits.log_softmax(-1), found.end_logits.log_softmax(-1)]
    expected = -(taken[0][[0, 1], start].mean() + taken[1][[0, 1], end].mean()) / 2
    torch.testing.assert_close(found.loss, expected)
    again = model(**given, start_positions=start[:, None], end_positions=end[:, None])
    assert torch.equal(again.loss, found.loss)
    beyond = model(**given, start_positions=torch.tensor([3, 7]), end_positions=torch.tensor([4, 900]))
    torch.testing.assert_close(beyond.loss, -(taken[0][0, 3] + taken[1][0, 4]) / 2)


@pytest.mark.parametrize("cls", twins.GENERATING)
def test_the_cache_takes_new_tokens_alone(cls):
    """As GPT-2's: one or several at a time, with scores and states of each."""
    name = "decoder_input_ids" if cls is SEQ2SEQ else "input_ids"
    model, given = built(cls, **{"max_target_positions": 64}), drawn(cls)
    tokens = torch.randint(4, twins.ROWS, (2, 37), generator=torch.Generator().manual_seed(2))
    asked = {"output_attentions": True, "output_hidden_states": True}
    whole = model(**given | {name: tokens}, **asked)
    scores, hidden, attentions, cache, done = [], [], [], None, 0
    for length in (5, 1, 1, 3, 9, 1, 17):
        part = given | {name: tokens[:, done : done + length]}
        found = model(**part, past_key_values=cache, use_cache=True, **asked)
        done, cache = done + length, found.past_key_values
        assert cache.get_seq_length() == done
        scores.append(found.logits)
        hidden.append(states_of(found, "hidden_states")[-1])
        attentions.append(torch.nn.functional.pad(states_of(found, "attentions")[-1], (0, 37 - done)))
    torch.testing.assert_close(torch.cat(scores, 1), whole.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(hidden, 1), states_of(whole, "hidden_states")[-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(attentions, 2), states_of(whole, "attentions")[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", [CAUSAL, SEQ2SEQ])
def test_generation_from_embeddings(cls):
    model, given = built(cls), {"input_ids": drawn(cls)["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    embeds = model.get_input_embeddings()(given["input_ids"])
    found, expected = model.generate(inputs_embeds=embeds, **how), model.generate(**given, **how)
    assert torch.equal(found[:, -6:], expected[:, -6:])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("cls", twins.GENERATING)
def test_states_of_generation(cls, use_cache):
    model, given = built(cls), {"input_ids": drawn(cls)["input_ids"]}
    kept = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": use_cache, "suppress_tokens": [1]}
    found = model.generate(**given, **kept, **how)
    begun = found.sequences.size(1) - 4
    for step, (hidden, weights) in enumerate(
        zip(states_of(found, "hidden_states"), states_of(found, "attentions"), strict=True)
    ):
        rows = 1 if use_cache and step else begun + step
        assert [part.shape for part in hidden] == [(2, rows, 16)] * 3
        assert [part.shape for part in weights] == [(2, 2, rows, begun + step)] * 2


@pytest.mark.parametrize("cls", twins.LANGUAGE)
def test_generation_goes_on_from_a_cache(cls):
    model, given = built(cls), drawn(cls)
    how = {"do_sample": False, "return_dict_in_generate": True, "suppress_tokens": [1, 2], "use_cache": True}
    whole = model.generate(**given, max_new_tokens=9, **how)
    first = model.generate(**given, max_new_tokens=4, **how)
    again = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=5, **how)
    assert torch.equal(again.sequences, whole.sequences)


ADAPTIVE = {"adaptive_softmax_cutoff": "8,16"}
CUT = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 3, "use_cache": True}
OWN = "stateful|custom_generate|trust_remote_code"  # transformers' own error
REFUSED = [
    (CAUSAL, ADAPTIVE, lambda model, ids: model.resize_token_embeddings(30), "adaptive softmax"),
    (MODEL, {}, lambda model, ids: model(ids).pooler_output, "pooler_output"),  # as of DistilBERT: nothing trained one
    (MEMORY, {}, lambda m, ids: m(inputs_embeds=m.get_input_embeddings()(ids), use_cache=True), "reads tokens again"),
    *((cls, {}, lambda model, ids: model.generate(input_ids=ids, **CUT), OWN) for cls in twins.GENERATING),
]


@pytest.mark.parametrize(("cls", "values", "call", "said"), REFUSED)
def test_what_a_model_has_not_is_refused(cls, values, call, said):
    """Embeddings of a model with memory have no cache, and no search may cut one."""
    with pytest.raises((ValueError, AttributeError, NotImplementedError), match=said):
        call(built(cls, **values), drawn(cls)["input_ids"])


def test_pre_training_is_the_masked_lm():
    """As transformers registers its RoBERTa."""
    config = copy.deepcopy(built(ours.RelPosForMaskedLM).config)
    assert isinstance(transformers.AutoModelForPreTraining.from_config(config), ours.RelPosForMaskedLM)


def test_a_classifier_has_the_trainers_loss():
    """Trainer divides the loss of accumulated batches by itself, unless forward takes any keyword."""
    assert "num_items_in_batch" not in ours.RelPosForSequenceClassification.forward.__code__.co_varnames
    assert not ours.RelPosForSequenceClassification.forward.__code__.co_flags & 0x08
