"""Segments: where they come from, what they do, and that nobody guesses them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from helpers.commands import call, losses
from helpers.roberta import ARCH, OPTIMIZE, small_roberta, tokens, write_packed, write_pairs
from relpos_fairseq.tasks.sentence_pairs import request_segments, segments_of_parts

BOS, EOS = 0, 2
TASK = [
    *("--task", "sentence_prediction", "--num-classes", "2", "--init-token", str(BOS)),
    *("--criterion", "sentence_prediction", "--batch-size", "4", "--max-positions", "20"),
]
SEPARATOR = ["--separator-token", str(EOS)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("single"), pairs=False)


def loaded(data: Path, *flags: str, wanted: bool = True):
    """The validation set of a sentence_prediction task."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [str(data), *ARCH, *TASK, *flags])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    if wanted:
        request_segments(task)
    task.load_dataset("valid")
    return task.datasets["valid"]


def raw(data: Path, name: str) -> list[int]:
    """Number of words of each validation sentence."""
    return [len(line.split()) for line in (data.parent / "raw" / f"valid.{name}").open()]


def samples(dataset) -> list[tuple[list[int], list[int]]]:
    """Tokens and segments of every sample, collated in batches of five, in order of id, without padding."""
    found = {}
    for start in range(0, len(dataset), 5):
        batch = dataset.collater([dataset[index] for index in range(start, min(start + 5, len(dataset)))])
        inputs = batch["net_input"]
        for number, ids, segments in zip(batch["id"], inputs["src_tokens"], inputs["segments"], strict=True):
            real = ids.ne(1)
            assert segments[~real].eq(0).all() and segments.shape == ids.shape
            found[int(number)] = (ids[real].tolist(), segments[real].tolist())
    return [found[number] for number in range(len(dataset))]


@pytest.mark.parametrize("separator", [False, True])
def test_segments_of_every_pair(pairs: Path, separator: bool) -> None:
    """<s> and the first sentence are 0; the separator and the second are 1; exactly."""
    found = samples(loaded(pairs, *(SEPARATOR if separator else [])))
    lengths = zip(raw(pairs, "input0"), raw(pairs, "input1"), strict=True)
    for (ids, segments), (first, second) in zip(found, lengths, strict=True):
        assert segments == [0] * (1 + first + 1) + [1] * (separator + second + 1)
        assert len(ids) == len(segments) and ids[0] == BOS and ids[first + 1] == EOS


def test_a_single_sentence_is_segment_0(single: Path) -> None:
    for ids, segments in samples(loaded(single)):
        assert segments == [0] * len(ids)


def test_truncated_pairs(pairs: Path) -> None:
    """Segments are cut where the tokens are cut."""
    whole = samples(loaded(pairs))
    cut = samples(loaded(pairs, "--shorten-method", "truncate", "--max-positions", "6"))
    assert cut == [(ids[:6], segments[:6]) for ids, segments in whole]


def test_randomly_cropped_pairs(pairs: Path) -> None:
    """A crop takes the same stretch of tokens and segments, in every epoch."""
    whole = samples(loaded(pairs))
    dataset = loaded(pairs, "--shorten-method", "random_crop", "--max-positions", "6")
    starts = []
    for epoch in (1, 2):
        dataset.set_epoch(epoch)
        for (ids, segments), (all_ids, all_segments) in zip(samples(dataset), whole, strict=True):
            matching = [
                start
                for start in range(len(all_ids) - len(ids) + 1)
                if all_ids[start : start + len(ids)] == ids and all_segments[start : start + len(ids)] == segments
            ]
            assert matching
            starts.append(matching[0])
    assert len(set(starts)) > 1


def test_no_one_else_is_given_segments(pairs: Path) -> None:
    """Fairseq's task is as it was where no model asks for segments."""
    dataset = loaded(pairs, wanted=False)
    assert "segments" not in dataset.collater([dataset[0]])["net_input"]


def test_building_a_model_asks_its_task(pairs: Path) -> None:
    from helpers.roberta import small_task

    for encoding in ("none", "input", "head"):
        task = small_task()
        small_roberta(task=task, segment_encoding=encoding)
        assert getattr(task, "wants_segments", False) == (encoding != "none")


def test_segments_of_parts() -> None:
    assert segments_of_parts([2, 0, 3]).tolist() == [0, 0, 2, 2, 2]
    assert segments_of_parts([4]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("encoding", ["input", "head"])
@pytest.mark.parametrize("share", ["auto", "heads", "layers", "both"])
def test_segment_tables_start_neutral_and_act(encoding: str, share: str) -> None:
    """At zero a model is the one without segments; elsewhere segments matter."""
    ids = tokens()
    segments = (torch.arange(ids.size(1)) > 3).long().expand_as(ids)
    scheme = {"position_scheme": "m4", "position_share": share}
    expected = small_roberta(**scheme)(ids)[0]
    model = small_roberta(**scheme, segment_encoding=encoding)
    torch.testing.assert_close(model(ids, segments=segments)[0], expected, rtol=0, atol=0)
    tables = [p for n, p in model.named_parameters() if n.endswith(("pair_table", ".table")) and p.eq(0).all()]
    assert len(tables) == {"input": 1, "head": 1 if share in ("layers", "both") else 2}[encoding]
    for table in tables:
        torch.nn.init.normal_(table)
    assert not torch.allclose(model(ids, segments=segments)[0], expected)
    # One segment is no division: a constant added to a row of logits changes nothing.
    if encoding == "head":
        torch.testing.assert_close(model(ids, segments=torch.zeros_like(ids))[0], expected)


def test_head_segments_are_chens_matrix() -> None:
    """S_{seg(i) seg(j)}: a scalar a head and layer for each ordered pair of segments."""
    model = small_roberta(position_scheme="none", segment_encoding="head", num_segments="3", encoder_layers=1).double()
    attention = model.encoder.sentence_encoder.layers[0].self_attn
    table = attention.position[0].pair_table
    assert table.shape == (2, 9)
    torch.nn.init.normal_(table)
    ids = tokens()[:1]
    segments = torch.tensor([[0, 0, 1, 1, 2, 2, 2, 0, 1]])
    stack = model.encoder.sentence_encoder.positions
    context = stack.context(stack.positions(ids, 1, 2, segments=segments))
    x = torch.randn(9, 1, 16, dtype=torch.double)
    _, probs = attention(x, need_weights=True, attn_mask=context)
    q, k = (p(x).view(9, 2, 8).transpose(0, 1) for p in (attention.q_proj, attention.k_proj))
    pairs = (segments[0, :, None] * 3 + segments[0]).tolist()
    for head, i in itertools.product(range(2), range(9)):
        row = torch.stack([q[head, i] @ k[head, j] / 8**0.5 + table[head, pairs[i][j]] for j in range(9)])
        torch.testing.assert_close(probs[0, head, i], row.softmax(0))


def test_undivided_text_is_one_segment(caplog: pytest.LogCaptureFixture) -> None:
    """A task without segments: segment 0, said once; separators divide nothing."""
    model = small_roberta(segment_encoding="input")
    table = model.encoder.sentence_encoder.positions.shared[-1].table
    torch.nn.init.normal_(table)
    ids = tokens()
    expected = model(ids, segments=torch.zeros_like(ids))[0]
    for _ in range(2):
        torch.testing.assert_close(model(ids)[0], expected, rtol=0, atol=0)
    assert caplog.text.count("every token is in segment 0") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"num_segments": "3"}, "--num-segments 3 does not apply to --segment-encoding none"),
        ({"num_segments": "0", "segment_encoding": "head"}, "num_segments must be >= 1, got 0"),
        ({"segment_encoding": "heads"}, "--segment-encoding must be one of"),
    ],
)
def test_wrong_flags(flags: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_roberta(**flags)


def test_a_segment_without_a_table() -> None:
    with pytest.raises(ValueError, match=r"segments must be in 0..1, got 2 \(--num-segments\)"):
        small_roberta(segment_encoding="head")(tokens(), segments=torch.full_like(tokens(), 2))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["input", "head"])
def test_fine_tuning_with_segments(pairs: Path, tmp_path: Path, encoding: str) -> None:
    """The real command: tables of segments learn, and validation reads them."""
    flags = [str(pairs), *ARCH, *TASK, *SEPARATOR, *OPTIMIZE, "--segment-encoding", encoding]
    output = call("train", *flags, "--save-dir", str(tmp_path), "--max-epoch", "2")
    assert "every token is in segment 0" not in output
    assert np.isfinite(losses(output, "valid")).all()
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)["model"]
    name = {"input": "positions.shared.1.table", "head": "position.0.pair_table"}[encoding]
    table = next(value for key, value in state.items() if key.endswith(name))
    assert table.abs().max() > 0
    paths = ["--path", str(tmp_path / "checkpoint_last.pt"), "--user-dir", ARCH[1]]
    task = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--cpu"]
    validated = call("validate", str(pairs), *paths, *task, "--batch-size", "7")
    assert losses(validated, "valid") == pytest.approx(losses(output, "valid")[-1:], abs=1e-3)


@pytest.mark.slow
def test_packed_text_has_no_segments(tmp_path: Path) -> None:
    """Pre-training with segments says that there are none, and leaves the tables neutral."""
    data = write_packed(tmp_path, 40)
    output = call(
        *("train", str(data), *ARCH, *OPTIMIZE, "--task", "masked_lm", "--criterion", "masked_lm"),
        *("--tokens-per-sample", "24", "--sample-break-mode", "complete", "--batch-size", "8"),
        *("--segment-encoding", "head", "--save-dir", str(tmp_path / "save"), "--max-update", "2"),
    )
    assert output.count("every token is in segment 0") == 1
