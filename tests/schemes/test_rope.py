"""RoPE's other angles: as transformers has them, and what checkpoints remember."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from cases import Case, plan_of
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.options import AttentionShape
from relpos_fairseq.core.placement import Placement, PositionMismatchError
from relpos_fairseq.core.positions import Positions

LLAMA = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SEARCHED = [[1 + pair / step for pair in range(32)] for step in (64, 8)]
LONG = {"scaling": "longrope"} | {
    f"{name}_factor": ",".join(map(str, numbers)) for name, numbers in zip(("short", "long"), SEARCHED, strict=True)
}
PHI = {"rope_type": "longrope", "short_factor": SEARCHED[0], "long_factor": SEARCHED[1]}


LONG4 = {"scaling": "longrope", "factor": "2", "short_factor": "1,1", "long_factor": "1.5,3.25"}


def placement(longest: int = 12, dim: int = 4, **flags: str) -> Placement:
    """The positions of a model under flags given without their prefix."""
    given = {f"position_rope_{name}": value for name, value in flags.items()}
    return Placement(plan_of(Case("rope", given), longest=longest, dim=dim))


@pytest.mark.parametrize(
    ("flags", "scaling"),
    [
        ({}, None),
        ({"base": "500000"}, None),
        ({"share": "0.25"}, None),
        ({"scaling": "linear", "factor": "4"}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling": "yarn", "factor": "8"}, {"rope_type": "yarn", "factor": 8.0}),
        ({"scaling": "yarn", "factor": "2.5", "share": "0.5"}, {"rope_type": "yarn", "factor": 2.5}),
        (
            {"scaling": "yarn", "factor": "8", "fast_turns": "24", "slow_turns": "2", "attention_factor": "1.5"},
            {"rope_type": "yarn", "factor": 8.0, "beta_fast": 24, "beta_slow": 2, "attention_factor": 1.5},
        ),
        ({"scaling": "llama3", "factor": "8"}, LLAMA | {"factor": 8.0}),
        (
            {"scaling": "llama3", "factor": "32", "base": "500000", "slow_turns": "0.5", "fast_turns": "2"},
            LLAMA | {"factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0},
        ),
        (LONG | {"factor": "4"}, PHI | {"factor": 4.0}),
        (LONG | {"factor": "4", "attention_factor": "1.125"}, PHI | {"factor": 4.0, "attention_factor": 1.125}),
        ({"scaling": "dynamic"}, {"rope_type": "dynamic", "factor": 1.0}),
        ({"scaling": "dynamic", "factor": "4"}, {"rope_type": "dynamic", "factor": 4.0}),
    ],
)
@pytest.mark.parametrize("length", [40, 200])
def test_equals_transformers(flags, scaling, length, monkeypatch) -> None:
    """Llama's rotations of transformers, which are in single precision, worked out in double."""
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama as theirs

    dim, trained = 64, 64
    share = float(flags.get("share", "1"))
    config = SimpleNamespace(
        rope_theta=float(flags.get("base", "10000")),
        hidden_size=2 * dim,
        num_attention_heads=2,
        max_position_embeddings=trained,
        partial_rotary_factor=share,
        rope_scaling=scaling,
    )
    q, k = torch.randn(2, 1, 2, length, dim, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "max", lambda x: int(x.max()))  # times a float, it would be single
        angles = theirs.LlamaRotaryEmbedding(config=config)
        if "long_factor" in flags:  # which the module takes for every length; short inputs' size differs by release
            config.original_max_position_embeddings, config.max_position_embeddings = trained, 4 * trained
            angles.inv_freq, size = modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", length)
            sized = length > trained or "attention_factor" in flags
            angles.attention_scaling = size if sized else (1 + math.log(4) / math.log(trained)) ** 0.5
        cos, sin = angles(q, torch.arange(length)[None])
        n = int(share * dim)
        turned = theirs.apply_rotary_pos_emb(q[..., :n], k[..., :n], cos, sin)
    made = placement(trained, dim, pairs="halves", **flags)
    scheme, prepared = made.context(Positions(length, length)).rotation
    for x, expected in zip((q, k), turned, strict=True):
        got = scheme.transform_query(x, prepared, 0)
        torch.testing.assert_close(got[..., :n], expected, rtol=0, atol=1e-10)
        assert torch.equal(got[..., n:], x[..., n:])


def test_a_checkpoint_remembers_the_trained_length() -> None:
    """Other angles may be chosen later, and count from the length in training."""
    trained = placement(12).state_dict()
    later = placement(48, scaling="yarn")
    later.load_state_dict(trained)
    assert later.shared[0].trained_length == 12
    assert "rope.rope_scaling=yarn" in later.plan.describe()
    chosen = placement(48, scaling="yarn", length="20")
    chosen.load_state_dict(trained)
    assert chosen.shared[0].trained_length == 20
    old = {key: value for key, value in trained.items() if "length" not in key}
    later = placement(48, log_n="on")
    later.load_state_dict(old)  # of a version that did not remember it
    assert later.shared[0].trained_length == 48
    again = placement(48, scaling="yarn")
    again.load_state_dict(placement(12, scaling="yarn").state_dict())
    assert again.shared[0].trained_length == 12


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"scaling": "yarn"}, {}),
        ({"scaling": "yarn"}, {"scaling": "linear"}),
        ({"scaling": "ntk", "factor": "2"}, {"scaling": "ntk", "factor": "4"}),
        ({}, {"pairs": "halves"}),
        ({}, {"share": "0.5"}),
        ({"base": "500"}, {}),
        (LONG4, {}),
        (LONG4, LONG4 | {"long_factor": "1.5,2"}),
    ],
    ids=str,
)
def test_what_training_fixed_stays(before: dict, after: dict) -> None:
    with pytest.raises(PositionMismatchError, match="give the checkpoint's flags"):
        placement(12, **after).load_state_dict(placement(12, **before).state_dict())


def test_plain_rope_says_what_it_said() -> None:
    """Checkpoints that are older than the options load."""
    assert placement().plan.describe() == "rope scale=1 segments=none"


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_counts_tokens_where_they_matter(padded: bool) -> None:
    """Padding after the tokens moves none of them, but makes rows of other lengths."""
    words = torch.full((2, 6), 5)
    if padded:
        words[0, 4:] = 1
    plain, counting = (placement(log_n=n).positions(words, 1, 2) for n in ("off", "on"))
    assert plain.token_index is None
    assert counting.row_lengths().tolist() == ([4, 6] if padded else [6])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"factor": "2"}, r"--position-rope-factor 2 needs --position-rope-scaling \(got none\)"),
        ({"factor": "0.5", "scaling": "yarn"}, "must be >= 1"),
        ({"share": "0.1"}, "rope_share must leave 2 to 4 channels of head_dim 4.*got 0.1"),
        ({"share": "1.5"}, r"got 1.5 \(--position-rope-share\)"),
        ({"base": "1"}, "rope_base must be > 1, got 1"),
        ({"length": "1"}, "rope_length must be >= 2, got 1"),
        (
            {"slow_turns": "2"},
            "--position-rope-slow-turns belongs to --position-rope-scaling yarn and llama3, not to none",
        ),
        ({"scaling": "ntk", "long_factor": "1,2"}, "--position-rope-long-factor belongs to .*longrope, not to ntk"),
        ({"scaling": "llama3", "factor": "8", "slow_turns": "4"}, "slow-turns must be below .*fast-turns, got 4 and 4"),
        (
            {"scaling": "longrope", "factor": "8"},
            "short-factor of longrope must have a number for each of 2 pairs, got 0",
        ),
        (
            {"scaling": "longrope", "short_factor": "1,x"},
            "rope_short_factor must be numbers > 0, joined by commas, got 1,x",
        ),
        ({"scaling": "longrope", "short_factor": "1,1", "long_factor": "1,2"}, "longrope needs --position-rope-factor"),
        ({"scaling": "long"}, "--position-rope-scaling must be auto, none, linear, ntk, yarn, dynamic, llama3 or"),
    ],
)
def test_bad_flags(flags: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        placement(**flags)
    assert "\n" not in str(caught.value)


def test_other_schemes_take_none_of_it() -> None:
    config = PositionConfig(position_scheme="m4", position_rope_scaling="yarn")
    shape = AttentionShape(embed_dim=8, num_heads=2, max_positions=4)
    with pytest.raises(ValueError, match="--position-rope-scaling yarn does not apply .* m4"):
        resolve(config, shape, "translation")
