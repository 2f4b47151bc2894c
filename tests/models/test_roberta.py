"""`relpos_roberta` as a whole: beside fairseq's own, in batches, with heads, from checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.criterions.sentence_prediction import SentencePredictionConfig
from fairseq.models.roberta.model import RobertaModel
from torch import Tensor

from cases import CASES, ENCODERS, Case
from helpers import FULL
from helpers.forms import told_apart
from helpers.models import BIASES, randomized
from helpers.roberta import small_roberta, small_task, tokens
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.criterions.sentence_prediction_glue import SentencePredictionGlueCriterion
from relpos_fairseq.export.model_adapters import adapter_of
from relpos_fairseq.models import encoder
from relpos_fairseq.models.configs import namespace
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel

HYBRIDS = ("learned+m4m", "rope+m4", "learned+rel_scalar")
SCHEMES = (*ENCODERS, *HYBRIDS)
IN_ENCODERS = [case for case in CASES if not case.causal_only]
IN_ENCODERS.append(Case("learned", {"segment_encoding": "input"}))


def fairseq_roberta(ours: RelPosRobertaModel, learned: bool) -> RobertaModel:
    """Fairseq's RoBERTa with our parameters."""
    args = namespace(ours.args, 12)
    args.encoder_learned_pos, args.no_token_positional_embeddings = learned, False
    theirs = RobertaModel.build_model(args, small_task()).eval()
    state = dict(ours.state_dict())
    prefix = "encoder.sentence_encoder."
    table = state.pop(f"{prefix}positions.shared.0.table", None)
    state = {name: value for name, value in state.items() if ".position" not in name}
    if table is not None:  # fairseq's first two rows are those of padding
        rows = torch.cat([table.new_zeros(2, table.size(1)), table])
        state[f"{prefix}embed_positions.weight"] = rows
    missing, unexpected = torch.nn.Module.load_state_dict(theirs, state, strict=False)
    assert not unexpected
    assert all("embed_positions" in name for name in missing)
    return theirs


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal"])
def test_it_is_fairseqs_roberta(scheme: str) -> None:
    """Absolute positions at the input: fairseq's own model, to rounding."""
    ours = small_roberta(position_scheme=scheme).double()
    theirs = fairseq_roberta(ours, scheme == "learned").double()
    ids = tokens()
    real = ids.ne(1)
    torch.testing.assert_close(ours(ids)[0][real], theirs(ids)[0][real], rtol=0, atol=1e-6)
    masked = real & (ids > 5)
    expected = theirs(ids, masked_tokens=masked)[0]
    torch.testing.assert_close(ours(ids, masked_tokens=masked)[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_scheme_changes_no_other_initial_value(scheme: str) -> None:
    """BERT's initialisation, drawn twice, neither redraws a scheme nor depends on it."""
    plain = dict(small_roberta(position_scheme="none").named_parameters())
    model = small_roberta(position_scheme=scheme)
    stack = Placement(model.encoder.sentence_encoder.positions.plan)
    torch.manual_seed(1)
    own = {f"positions.{n}": p for n, p in Placement(stack.plan).named_parameters()}
    for layer in range(2):
        drawn = stack.layer_schemes(layer).named_parameters()
        once = [(name, p) for name, p in drawn if all(p is not known for known in own.values())]
        own |= {f"layers.{layer}.self_attn.position.{name}": p for name, p in once}
    for name, value in model.named_parameters():
        if name in plain:
            if "m4m" in scheme and name.endswith(BIASES):
                assert value.abs().sum() > 0, name  # M4M alone sets them, and BERT's zeros do not
            else:
                assert torch.equal(plain[name], value), name
        else:
            expected = own.pop(name.removeprefix("encoder.sentence_encoder."))
            assert torch.equal(expected, value), name
    assert not own


@pytest.mark.parametrize("case", IN_ENCODERS if FULL else told_apart(IN_ENCODERS), ids=str)
def test_batch_and_padding_change_nothing(case: Case) -> None:
    """Every scheme and form of terms: alone, in a batch, padded left or right, the same logits."""
    flags = {"segment_encoding": "head"} | case.flags
    model = randomized(small_roberta(position_scheme=case.scheme, **flags)).double()
    ids = tokens()
    segments = (torch.arange(9) > 3).long().expand_as(ids)
    expected = model(ids, segments=segments)[0]
    alone = model(ids[1:2, :7], segments=segments[1:2, :7])[0]
    torch.testing.assert_close(alone[0], expected[1, :7])
    rolled, turned = (part.roll(2, dims=1) for part in (ids, segments))
    left = model(torch.cat([ids[:1], rolled[1:2]]), segments=torch.cat([segments[:1], turned[1:2]]))
    torch.testing.assert_close(left[0][1, 2:], expected[1, :7])
    torch.testing.assert_close(left[0][0], expected[0])


@pytest.mark.parametrize("case", IN_ENCODERS if FULL else told_apart(IN_ENCODERS), ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_layers_leave_padding_out(case: Case, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side, and where it is a whole row: the same outputs of every layer, and the same gradients."""
    flags = {"segment_encoding": "head", "encoder_normalize_before": before} | case.flags
    stack = randomized(small_roberta(position_scheme=case.scheme, **flags)).double().encoder.sentence_encoder
    ids = torch.cat([tokens(), tokens()[1:2].roll(2, dims=1), torch.ones(1, 9, dtype=torch.long)])
    real, segments = ids.ne(1), (torch.arange(9) > 3).long().expand_as(ids)
    rows = []
    for layer in stack.layers:
        layer.return_fc = True
        layer.fc1.register_forward_pre_hook(lambda module, given: rows.append(given[0][..., 0].numel()))
    monkeypatch.setattr(encoder, "PADDED", -1)
    found = []
    for share in (1, 0):
        monkeypatch.setattr(encoder, "SHARE", share)
        stack.zero_grad()
        out = stack(ids, return_all_hiddens=True, segments=segments)
        parts = [part.transpose(0, 1) for part in (*out["encoder_states"], *out["fc_results"], *out["encoder_out"])]
        torch.manual_seed(2)
        sum((part[real] * torch.rand_like(part[real])).sum() for part in parts).backward()
        found.append([part[real] for part in parts] + [p.grad for p in stack.parameters()])
        assert all(part.isfinite().all() for part in parts)
    assert rows == [45, 45, 32, 32]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_little_padding_is_computed_with_the_tokens() -> None:
    """Up to a twentieth of a batch, or some rows of a narrow model: moving rows would take longer."""
    padding = torch.arange(100).expand(10, 100) >= torch.arange(91, 101)[:, None]
    assert encoder.unpadded(padding, 512) is None
    padding[0] |= torch.arange(100) > 50
    assert encoder.unpadded(padding, 64) is None
    assert len(encoder.unpadded(padding, 512)) == (~padding).sum()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_learns_from_masked_lm(scheme: str) -> None:
    """Fairseq's criterion: a finite loss, and a gradient for every parameter."""
    task = small_task()
    model = small_roberta(task=task, position_scheme=scheme).train()
    ids = tokens()
    target = torch.where(torch.arange(9) % 2 == 1, ids, 1)
    masked = torch.where(target.ne(1), task.source_dictionary.index("<mask>"), ids)
    sample = {"net_input": {"src_tokens": masked}, "target": target, "ntokens": 25, "nsentences": 3}
    criterion = MaskedLmLoss(MaskedLmConfig(tpu=False), task)
    loss, size, _ = criterion(model, sample)
    (loss / size).backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def test_sentences_of_a_packed_block_count_from_their_own_start() -> None:
    """`sentence`: real positions of M4M App. B, <s> being part of the first sentence."""
    model = small_roberta(position_scheme="sentence")
    encoder = model.encoder.sentence_encoder
    ids = torch.tensor([[0, 5, 6, 2, 7, 2, 8, 9, 10, 2, 1, 1]])
    positions = encoder.positions.positions(ids, 1, 2)
    added = encoder.positions.embed(positions)[0]
    table = encoder.positions.shared[0].table
    assert torch.equal(added[:10], table[[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]])
    packed = model(ids[:, :6])[0]
    moved = small_roberta(position_scheme="learned")(ids[:, :6])[0]
    assert not torch.allclose(packed, moved)


def test_layer_norm_eps_reaches_every_layer_norm() -> None:
    """Embeddings, both of each layer, and the LM head's."""
    for eps in (1e-5, 1e-12):
        model = small_roberta(layer_norm_eps=eps)
        norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
        assert len(norms) == 1 + 2 * 2 + 1
        assert {norm.eps for norm in norms} == {eps}


OPTIONS = (
    {"encoder_normalize_before": True, "no_layernorm_embedding": True},
    {"untie_weights_roberta": True},
    {"encoder_layerdrop": 0.4},
    {"activation_fn": "gelu_accurate"},
    {"quant_noise_pq": 0.2},
)


@pytest.mark.parametrize("values", OPTIONS, ids=lambda values: next(iter(values)))
def test_options_of_fairseqs_roberta(values: dict) -> None:
    model = small_roberta(position_scheme="m4", **values)
    assert model(tokens())[0].isfinite().all()
    tied = model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight
    assert tied != values.get("untie_weights_roberta", False)
    model.train()(tokens())[0].sum().backward()


def test_longer_input_than_trained() -> None:
    """A relative scheme takes it; a table says what to do."""
    ids = tokens(length=40)
    model = small_roberta(position_scheme="m4", position_clip_distance="5", max_positions=8)
    assert model(ids)[0].shape == (3, 40, 25)
    with pytest.raises(ValueError, match="learned has a table of 12 .* has 40.*--max-positions"):
        small_roberta(position_scheme="learned")(ids)


def test_heads() -> None:
    """Classification, span and token heads, alone and by name."""
    model, ids = with_heads(), tokens()
    features = model(ids, features_only=True)[0]
    torch.testing.assert_close(
        model(ids, classification_head_name="glue")[0], model.classification_heads["glue"](features)
    )
    spans, extra = model(ids, span_head_name="squad")
    assert spans.shape == (3, 9, 2) and "inner_states" in extra
    out = model.span_heads["squad"].out_proj
    torch.testing.assert_close(spans[..., 1], features @ out.weight[1] + out.bias[1])
    named = model(ids, token_head_name="entities")[0]
    out = model.token_heads["entities"].out_proj
    assert named.shape == (3, 9, 5)
    torch.testing.assert_close(named, features @ out.weight.T + out.bias)
    with pytest.raises(ValueError, match="no head 'other' is registered; there are: glue"):
        model(ids, classification_head_name="other")
    with pytest.raises(ValueError, match="no head 'glue' is registered; there are: squad"):
        model(ids, span_head_name="glue")
    with pytest.raises(ValueError, match="no head 'squad' is registered; there are: entities"):
        model(ids, token_head_name="squad")
    for other in ({"classification_head_name": "glue"}, {"span_head_name": "squad"}):
        with pytest.raises(ValueError, match="one head at a time, got '[a-z]+' and 'entities'"):
            model(ids, token_head_name="entities", **other)
    with pytest.raises(ValueError, match="one head at a time"):
        model(ids, classification_head_name="glue", span_head_name="squad")


def with_heads(**values) -> RelPosRobertaModel:
    model = small_roberta(**values)
    model.register_classification_head("glue", num_classes=3)
    model.register_question_answering_head("squad")
    model.register_token_classification_head("entities", num_classes=5)
    return model


def test_heads_are_saved_and_loaded() -> None:
    """Into a model that has them, that is told to make them, and that has none."""
    saved, ids = with_heads(), tokens()
    for other in (with_heads(seed=2), small_roberta(seed=2, load_checkpoint_heads=True)):
        other.load_state_dict(dict(saved.state_dict()))
        for head in (
            {"classification_head_name": "glue"},
            {"span_head_name": "squad"},
            {"token_head_name": "entities"},
        ):
            assert torch.equal(other(ids, **head)[0], saved(ids, **head)[0])
    plain = small_roberta(seed=2)
    plain.load_state_dict(dict(saved.state_dict()))
    assert torch.equal(plain(ids)[0], saved(ids)[0])
    assert not plain.span_heads and not plain.classification_heads and not plain.token_heads


def test_new_heads_keep_their_own_weights() -> None:
    """A pre-trained checkpoint without heads, loaded for fine-tuning."""
    saved, model = small_roberta(), with_heads(seed=2)
    before = {n: p.clone() for n, p in model.named_parameters() if "_heads." in n}
    model.load_state_dict(dict(saved.state_dict()))
    assert before and all(torch.equal(model.get_parameter(n), p) for n, p in before.items())
    other = small_roberta(seed=3)
    other.register_classification_head("glue", num_classes=5)
    other.register_token_classification_head("entities", num_classes=7)
    other.load_state_dict(dict(with_heads().state_dict()))  # another size: left out, and said
    assert other.classification_heads["glue"].out_proj.out_features == 5
    assert other.token_heads["entities"].out_proj.out_features == 7


def test_adaptive_pruning() -> None:
    """Its losses join fairseq's, and weigh heads and feed-forwards."""
    task = small_task()
    task.label_dictionary, task.datasets = task.source_dictionary, {}
    model = small_roberta(task=task, mha_reg_scale_factor=0.5, ffn_reg_scale_factor=0.25)
    model.register_classification_head("head", num_classes=2)
    ids = tokens()
    sample = {"net_input": {"src_tokens": ids}, "target": torch.tensor([0, 1, 1]), "ntokens": 25}
    config = SentencePredictionConfig(classification_head_name="head")
    _, _, logged = SentencePredictionGlueCriterion(config, task)(model, sample)
    layers = model.encoder.sentence_encoder.layers
    parts = [p for layer in layers for m in (layer.fc1, layer.fc2) for p in m.parameters()]
    expected = 0.25 * sum(part.abs().sum() for part in parts)
    torch.testing.assert_close(logged["ffn_reg_loss"], expected.detach())
    plain = torch.nn.functional.cross_entropy(
        model(ids, classification_head_name="head")[0], sample["target"], reduction="sum"
    )
    added = logged["ffn_reg_loss"] + logged["mha_reg_loss"]
    torch.testing.assert_close(logged["loss"], (plain + added).detach())


def hidden(model: RelPosRobertaModel, ids: Tensor) -> list[Tensor]:
    return model(ids, features_only=True, return_all_hiddens=True)[1]["inner_states"]


def test_hidden_states_and_given_embeddings() -> None:
    model, ids = small_roberta(), tokens()
    states = hidden(model, ids)
    assert [tuple(state.shape) for state in states] == [(9, 3, 16)] * 3
    torch.testing.assert_close(states[-1].transpose(0, 1), model(ids, features_only=True)[0])
    embedded = model.encoder.sentence_encoder.embed_tokens(ids)
    features = model.encoder.extract_features(ids, token_embeddings=embedded)[0]
    torch.testing.assert_close(features, model(ids, features_only=True)[0])


def test_a_task_of_any_kind_can_be_asked() -> None:
    """Nothing but a dictionary and a length is read of a task."""
    task = small_task()
    bare = SimpleNamespace(source_dictionary=task.source_dictionary, max_positions=lambda: 7)
    assert small_roberta(task=bare).max_positions() == 7


@pytest.mark.parametrize("scheme", ["sinusoidal", "m4+t5", "rope"])
def test_evaluation_draws_positions_where_it_is_asked_to(scheme: str) -> None:
    """What training computes at those positions; one subset for a length, whatever came before."""
    flags = {"position_scheme": scheme, "position_random_range": "40", "max_positions": 40}
    model = randomized(small_roberta(position_random_at="always", **flags))
    for layer in model.encoder.sentence_encoder.layers:
        layer.self_attn.k_proj.weight.data.mul_(30)  # so that attention is far from even
    plain = small_roberta(**flags)
    plain.load_state_dict(model.state_dict())
    ids, positions = tokens(), plain.encoder.sentence_encoder.positions
    found = model(ids)[0]
    model(tokens(2, 7))
    torch.manual_seed(99)
    assert torch.equal(model(ids)[0], found)
    assert not torch.allclose(plain(ids)[0], found, rtol=0, atol=1e-5)
    sample = positions._random.sample
    positions._random.sample = lambda length, by_batch: sample(length, by_batch=False)
    assert torch.equal(plain.train()(ids)[0], found)


def test_what_is_drawn_is_not_exported() -> None:
    flags = {"position_random_range": "40", "position_random_at": "always"}
    model = small_roberta(position_scheme="m4", **flags)
    with pytest.raises(ValueError, match="export with --position-random-at training"):
        adapter_of(model).graphs()[0].exported()
