"""Names, options and defaults that users hold on to, and the errors they meet."""

from __future__ import annotations

import dataclasses
import math
import re
import sys

import pytest
import torch

import relpos_fairseq
from cases import LIKE_OTHERS, Case, build, kinds_of
from helpers import ROOT, processes
from relpos_fairseq import scheme_table
from relpos_fairseq.core.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.core.options import (
    CLIP_DISTANCE,
    INIT,
    SHARE,
    Choice,
    Factor,
    Factors,
    Number,
    declared_options,
    in_order,
)
from relpos_fairseq.core.placement import Placement, PositionMismatchError
from relpos_fairseq.core.plan import PositionPlan, decode_text, encode_text
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import REGISTER, AttentionShape, register_scheme
from relpos_fairseq.schemes import parse_hybrid, scheme_class, scheme_names

# Flags of the command line that no scheme declares: before those that schemes declare, and after them.
FIRST = ("position_scheme", "encoder_position_scheme", "decoder_position_scheme")
LAST = ("segment_encoding", "segment_share", "num_segments", "attention_backend")
# What some help texts say beside what their option declares.
TEXTS = {
    "position_rank": "auto: head_dim",
    "position_random_at": "auto: training",
    "position_p2c_index": "mirrored (a_{-r}",
    "position_rope_length": "what the checkpoint remembers",
    "position_fire_threshold": "auto: 512",
    "position_contexts": "auto: the longest input + 1",
    "position_scalar_gain": "auto: 1",
    "position_query_bias": "auto: on",
}
SHAPE = AttentionShape(embed_dim=16, num_heads=4, max_positions=32)


def plan(scheme: str, model: str = "translation", causal: bool = False, **flags):
    """A resolved plan of a small attention."""
    shape = AttentionShape(16, 4, 32, causal)
    return resolve(PositionConfig(position_scheme=scheme, **flags), shape, model)


def sides_of(**flags: str) -> list[PositionPlan]:
    """Resolved plans of a small translation's encoder and decoder."""
    both = ("encoder", "decoder")
    return [resolve(PositionConfig(**flags), SHAPE, "translation", side=side, sides=both) for side in both]


def contract() -> dict[str, dict[str, str]]:
    """The committed table of schemes: by name, the cell under each heading."""
    text = (ROOT / "relpos_fairseq" / "schemes" / "README.md").read_text()
    begin, end = scheme_table.BEGIN.format("table"), scheme_table.END.format("table")
    rows = text.split(begin)[1].split(end)[0].strip().replace("\\|", "¦").splitlines()
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    return {row[0].strip("`"): dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def test_flags_keep_names_and_order_and_say_who_takes_them() -> None:
    """Flags are those that schemes declare, in the order of `place`; a help text names the schemes that take it."""
    found = {part.name: part.metadata["help"] for part in dataclasses.fields(PositionConfig)}
    options = in_order({option for name in scheme_names() for option in scheme_class(name).takes})
    assert list(found) == [*FIRST, *(option.field for option in options), *LAST]
    for option in options:
        text = found[option.field]
        (said,) = re.findall(re.escape(option.help) + r" \((all but )?([\w, ]+)\)", text)
        named = set(said[1].split(", "))
        taking = {name for name in scheme_names() if option in scheme_class(name).takes}
        assert (set(scheme_names()) - named if said[0] else named) == taking, text
        assert TEXTS.get(option.field, "") in text


def test_commands_know_every_flag_without_importing_a_scheme() -> None:
    """`relpos convert --help` has the flags of every option, and reads them from the sources."""
    said = ("field", "flag", "help", "metavar", "training_only")
    assert [[getattr(option, name) for name in said] for option in declared_options()] == [
        [getattr(option, name) for name in said] for option in OPTIONS
    ]


@pytest.mark.parametrize("name", scheme_names())
def test_terms_are_a_tuple(name: str) -> None:
    stack, layer = build(Case(name), causal=scheme_class(name).causal_only)
    for scheme in (*stack.shared, *layer):
        positions = Positions(3, 3)
        assert isinstance(scheme.terms(scheme.prepare(positions), positions), tuple), f"{name}.terms returns a tuple"


@pytest.mark.parametrize("name", scheme_names())
def test_contract_table(name: str) -> None:
    """Sharing, clipping, longest input and BERT-base's parameter count are those of the committed table."""
    row, cls = contract()[name], scheme_class(name)
    assert row["shared by"] == (cls.default_share or "-")
    assert row["max length"] == ("its table" if cls.table_limited else "any")
    assert row["BERT-base parameters"] == f"{scheme_table.parameters(name):,}"
    options = plan(name, causal=cls.causal_only).members[0].options
    clip = row["clip (translation / LM / MLM)"].split(" / ")[0]
    assert clip == (str(options.clip_distance) if CLIP_DISTANCE in cls.takes else "-")


@pytest.mark.parametrize(
    ("model", "vectors", "scalars"), [("translation", 16, 128), ("language_model", 64, 256), ("masked_lm", 0, 0)]
)
def test_auto_clip_distance(model: str, vectors: int, scalars: int) -> None:
    assert plan("m4", model).members[0].options.clip_distance == vectors
    assert plan("rel_scalar", model).members[0].options.clip_distance == scalars


@pytest.mark.parametrize(
    ("scheme", "flags", "count"),
    [
        # M4M Table 5: m(2n-1); + m(d/h)^2 once; mnd/h + m(d/h)^2 + m(2n-1) (and our two thetas)
        ("t5", {"position_buckets": "0", "position_share": "heads"}, 12 * 1023),
        ("deberta", {"position_projections": "one"}, 12 * (1023 * 64 + 64 * 64)),
        ("tupe", {"position_projections": "one", "position_reset_cls": "off"}, 12 * (512 * 64 + 64 * 64 + 1023)),
    ],
)
def test_published_counts(scheme: str, flags: dict, count: int) -> None:
    shape = AttentionShape(embed_dim=768, num_heads=12, max_positions=512)
    made = resolve(PositionConfig(position_scheme=scheme, **flags), shape, "masked_lm")
    layers = [Placement(made).layer_schemes(layer) for layer in range(12)]
    assert sum(value.numel() for layer in layers for value in layer.parameters()) == count


def started(scheme: str, init: str, **flags) -> torch.nn.Module:
    stack = Placement(plan(scheme, position_init=init, **flags))
    (member,) = [*stack.shared, *stack.layer_schemes(0)]
    return member


@pytest.mark.parametrize("scheme", [s for s in scheme_names() if INIT in scheme_class(s).takes])
def test_neutral_start_changes_no_logit(scheme: str) -> None:
    flags = {"position_share": "heads"} if SHARE in scheme_class(scheme).takes else {}
    member = started(scheme, "neutral", **flags)
    for name, value in member.named_parameters():
        neutral = member.table_of(name).neutral
        assert neutral is None or bool((value == neutral).all()), name
    assert scheme == "m4m" or any(table.neutral is not None for table in member.tables.values())


def test_paper_start() -> None:
    """M4M from N(0, 0.02) with the model's own biases; u and v, and Shaw's tables, as released code draws them."""
    table = started("m4m", "paper", position_clip_distance="64").table
    assert abs(float(table.std()) - 0.02) < 0.002 and abs(float(table.mean())) < 0.002
    q, k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    kept = q.bias.clone()
    started("m4m", "paper").initialize_projections(q, k)
    assert torch.equal(q.bias, kept)
    biases = started("transformer_xl", "paper")
    assert 0.005 < float(biases.content_bias.std()) < 0.04 and biases.position_bias.any()
    assert not started("transformer_xl", "auto").content_bias.any()
    shaw = started("shaw", "paper", position_share="none")
    heads, rows, width = shaw.key_table.shape
    limit = math.sqrt(6 / (rows + width))  # Glorot's, by tensor2tensor's uniform_unit_scaling
    keys_alone = started("shaw_keys", "paper", position_share="none")
    for table in (shaw.key_table, shaw.value_table, keys_alone.key_table):
        assert 0.95 * limit < float(table.abs().max()) <= limit
        assert abs(float(table.std()) - limit / math.sqrt(3)) < 0.05 * limit
    assert abs(float(started("shaw", "auto").key_table.std()) - 0.02) < 0.004
    with pytest.raises(ValueError, match="no gradient leaves it"):
        started("tupe", "neutral", position_projections="one")


def test_a_later_option_says_nothing_of_auto() -> None:
    later = Number(name="n", place=0, help="", auto=2, later=True)
    assert [later.memory(value, None) for value in (2, 3)] == [None, "n=3"]


@pytest.mark.parametrize(
    ("scheme", "flags", "message"),
    [
        ("m5", {}, r"unknown position scheme 'm5': choose one of none, .*m4m"),
        ("m4+foo", {}, r"unknown position scheme 'foo'"),
        ("none+m4", {}, r"none\+m4: none adds nothing"),
        ("m4+m4", {}, r"m4\+m4: each member may stand in a hybrid once"),
        ("deberta+m4", {}, r"deberta\+m4: its members' scales disagree \(deberta 1/sqrt\(3d\), m4"),
        ("rope+m3", {}, r"rope\+m3: rope rotates q and k"),
        ("fox+cable", {}, r"fox\+cable: cable would weigh the gates of fox and cable: choose one"),
        # A decoder never resets: asking a lone one for it is refused.
        ("m4", {"causal": True, "position_reset_cls": "on"}, "a decoder has no"),
        ("m4", {"position_rank": "4"}, r"--position-rank 4 does not apply to position scheme m4"),
        ("m1", {"position_clip_distance": "4"}, r"--position-clip-distance 4 does not apply .* m1"),
        ("learned", {"position_share": "heads"}, r"--position-share heads does not apply"),
        ("learned", {"position_scale": "2"}, r"--position-scale 2 does not apply"),
        ("m2", {"position_reset_cls": "on"}, r"--position-reset-cls on does not apply .* m2"),
        ("rope", {"position_reset_cls": "on"}, r"--position-reset-cls on does not apply"),
        ("m4", {"position_clip_distance": "-3"}, r"clip_distance must be >= 0, got -3"),
        ("m4", {"position_clip_distance": "x"}, r"clip_distance must be a whole number >= 0"),
        ("abs_scalar", {"position_rank": "0"}, r"rank must be >= 1, got 0"),
        ("m4", {"position_share": "all"}, r"--position-share must be .*got all"),
        ("m4", {"position_scale": "-1"}, r"scale must be > 0, got -1"),
        ("m4", {"position_scale": "nan"}, r"scale must be > 0, got nan"),
        ("t5", {"position_buckets": "2"}, r"buckets must be >= 4, got 2"),
        ("t5", {"position_max_distance": "8"}, r"max_distance must exceed the 8 distances"),
        ("deberta", {"position_projections": "content"}, r"must be own or one, got content"),
        ("transformer_xl", {"position_projections": "one"}, r"must be own or content, got one"),
        (
            "transformer_xl",
            {"position_projections": "content", "position_share": "heads"},
            r"--position-share must be none, got heads",
        ),
        ("transformer_xl", {"position_r_dropout": "1"}, r"--position-r-dropout must be below 1"),
        ("shaw", {"position_keys": "off", "position_reset_cls": "on"}, r"leaves no logits"),
        ("m4", {"segment_share": "heads"}, r"--segment-share heads does not apply"),
        ("deberta", {"position_p2c_index": "he"}, r"--position-p2c-index must be"),
        ("transformer_xl", {"position_query_bias": "no"}, r"--position-query-bias must be"),
        ("transformer_xl", {"clamp_len": "-1"}, r"clamp_len must be >= 0, got -1 \(--clamp-len\)"),
        ("rope", {"clamp_len": "4"}, r"--clamp-len 4 does not apply to position scheme rope"),
        ("m4", {"segment_encoding": "both"}, r"--segment-encoding must be one of .*got both"),
        ("m4", {"attention_backend": "flash"}, r"--attention-backend must be one of .*got flash"),
    ],
)
def test_bad_flags(scheme: str, flags: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plan(scheme, **flags)
    assert "\n" not in str(caught.value)


def test_a_decoder_never_resets() -> None:
    """TUPE's reset is for encoders."""
    assert plan("tupe").members[0].options.reset_cls
    assert not plan("tupe", causal=True).members[0].options.reset_cls


def test_sides_may_have_their_own_schemes() -> None:
    """An option is refused only if no side's scheme takes it."""
    encoder, decoder = sides_of(
        position_scheme="m4", decoder_position_scheme="abs_scalar", position_rank="2", position_clip_distance="5"
    )
    assert (encoder.name, decoder.name) == ("m4", "abs_scalar")
    assert encoder.members[0].options.clip_distance == 5
    assert decoder.members[0].options.rank == 2


def test_a_scale_makes_members_agree() -> None:
    assert plan("deberta+m4", position_scale="3").scale == (3 * 4) ** -0.5


@pytest.mark.parametrize("share", ["none", "heads", "layers", "both"])
def test_sharing_is_real(share: str) -> None:
    """One table where layers share it, one row where heads do."""
    made = Placement(plan("m4", position_share=share))
    layers = [made.layer_schemes(i) for i in range(3)]
    tables = [p for part in (made, *layers) for p in part.parameters()]
    assert len(tables) == (1 if share in ("layers", "both") else 3)
    assert tables[0].size(0) == (1 if share in ("heads", "both") else 4)


def test_checkpoints_know_their_scheme() -> None:
    """m4 and m4m have the same tensors; loading one as the other is refused and names both."""
    m4, m4m = (torch.nn.ModuleDict({"positions": Placement(plan(s))}) for s in ("m4", "m4m"))
    with pytest.raises(PositionMismatchError, match=r"trained with \[m4 .*flags say \[m4m "):
        m4m.load_state_dict(m4.state_dict())
    m4.load_state_dict(m4.state_dict())
    clip = torch.nn.ModuleDict({"positions": Placement(plan("m4", position_clip_distance="3"))})
    with pytest.raises(PositionMismatchError, match="clip_distance=16.*clip_distance=3"):
        clip.load_state_dict(m4.state_dict())


def test_identity_survives_averaging() -> None:
    """Sum and floor-divide, as fairseq averages integer tensors."""
    text = "learned+m4m m4m.clip_distance=16"
    total = sum(encode_text(text) for _ in range(9)) // 9
    assert decode_text(total) == text


def test_registering_twice() -> None:
    """The same class may register again (a second import); another may not take its name."""
    cls = scheme_class("m4")
    register_scheme("m4")(cls)
    with pytest.raises(ValueError, match="m4 is registered twice"):
        register_scheme("m4")(scheme_class("m4m"))
    assert scheme_class("m4m").name == "m4m"


class _Mine(scheme_class("t5")):
    """A stranger's."""


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("my-bias", {}, "'my-bias': a name has small letters, digits and _"),
        ("my+bias", {}, "'my.bias': a name has small letters, digits and _"),
        ("mine", {"info": None}, "mine: _Mine needs info = SchemeInfo"),
        (
            "mine",
            {"takes": {Number(name="clip_distance", place=1, help="mine", auto=3)}},
            "[a-z0-9_]+ and mine declare two options clip_distance: take one of them for both, or rename one",
        ),
        ("mine", {"default_share": "head"}, "default_share is none, heads, layers or both, or None, got 'head'"),
        ("mine", {"takes": [7]}, r"mine: takes is a frozenset of options, got \[7\]"),
        *(
            ("mine", {"takes": {kind(**{"name": "mine", "place": 1, "help": "m"} | given)}}, says)
            for kind, given, says in (
                (Number, {"auto": 1, "least": 2}, "auto=1: give a whole number >= 2, or None"),
                (Number, {"auto": True}, "auto=True: give a whole number >= 0"),
                (Number, {"auto": 4.5}, "auto=4.5: give a whole number >= 0"),
                (Number, {"auto": lambda shape: 3}, "auto is a function: say in auto_help what it means"),
                (Number, {"auto": 3, "name": "my-n"}, "option 'my-n': a name has letters, digits and _"),
                (Factor, {"auto": "much"}, "auto='much': give a number > 0"),
                (Factors, {"auto": 2.0}, "auto=2.0: give numbers > 0, joined by commas"),
                (Choice, {"auto": "yes"}, "auto='yes': give on or off"),
                (Choice, {"auto": "lerned", "choices": ("learned", "fixed")}, "auto='lerned': give learned or fixed"),
                (Choice, {"auto": True}, "auto=True: give on or off"),
                (Choice, {"auto": "a", "choices": "ab"}, "choices='ab': give a tuple of two words at least"),
            )
        ),
    ],
)
def test_a_scheme_that_cannot_be_registered_is_told_why(name, changes, says, monkeypatch) -> None:
    for attribute, value in changes.items():
        monkeypatch.setattr(_Mine, attribute, value)
    with pytest.raises(ValueError, match=says):
        register_scheme(name)(_Mine)
    assert name not in REGISTER


def test_a_tables_axis_that_is_no_name_is_named(monkeypatch) -> None:
    with pytest.raises(ValueError, match="t5: a table's axis rows_of_mine is no number, and no name"):
        build(Case("t5"))[0].shared[0]._axis("rows_of_mine")


def test_hybrids_may_be_spaced() -> None:
    """Spaces are no part of the name that a checkpoint remembers."""
    assert [cls.name for cls in parse_hybrid("learned + m4m")] == ["learned", "m4m"]
    assert plan("learned + m4m").describe() == plan("learned+m4m").describe()


def test_a_reset_that_no_encoder_takes_is_refused() -> None:
    """A decoder's scheme does not make the option apply."""
    with pytest.raises(ValueError, match="--position-reset-cls on does not apply"):
        sides_of(encoder_position_scheme="rope", decoder_position_scheme="t5", position_reset_cls="on")


@pytest.mark.parametrize("scheme", ["m4", "m4+learned", "learned+m4", "t5", "rope"])
def test_segments_are_shared_as_asked_not_as_a_neighbour(scheme: str) -> None:
    """By default each head and layer has its own; --position-share says otherwise."""
    made = Placement(plan(scheme, segment_encoding="head"))
    tables = [scheme.pair_table for scheme in made.layer_schemes(0) if scheme.name == "segment_head"]
    assert [tuple(table.shape) for table in tables] == [(4, 4)]
    shared = Placement(plan(scheme, segment_encoding="head", position_share="both"))
    assert [tuple(s.pair_table.shape) for s in shared.shared if s.name == "segment_head"] == [(1, 4)]


def test_segment_numbers_are_checked() -> None:
    made = Placement(plan("m4", segment_encoding="head"))
    tokens = torch.full((1, 3), 5)
    with pytest.raises(ValueError, match=r"segments must be in 0\.\.1, got 2"):
        made.positions(tokens, 1, 2, segments=torch.tensor([[0, 1, 2]]))


@pytest.mark.parametrize("scheme", sorted(LIKE_OTHERS))
def test_what_is_like_others_has_their_kinds_of_terms(scheme: str) -> None:
    """A scheme that is left out of slow tests has no kind of term that is then in none of them."""
    others = set().union(*(kinds_of(name) for name in scheme_names() if name not in LIKE_OTHERS))
    assert kinds_of(scheme) and not kinds_of(scheme) - others


def test_schemes_and_attention_need_no_fairseq() -> None:
    """On a machine without fairseq, positions, schemes and attention import and work."""
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n.startswith('fairseq') else find(n, *a)\n"
        "sys.modules['fairseq'] = None\n"
        "import relpos_fairseq, relpos_fairseq.attention, relpos_fairseq.schemes\n"
        "import relpos_fairseq.core.config, relpos_fairseq.core.placement\n"
        "print(relpos_fairseq.__version__, len(relpos_fairseq.schemes.scheme_names()))\n"
    )
    result = processes.run([sys.executable, "-c", code], cwd=ROOT)
    assert result.stdout.split() == [relpos_fairseq.__version__, str(len(scheme_names()))], result.stderr
