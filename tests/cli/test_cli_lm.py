"""The real fairseq commands with language models, on toy text."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

import relpos_fairseq  # noqa: F401
from helpers import commands as cli
from helpers.commands import QUIET, USER_DIR, by_two, call
from relpos_fairseq.cli.evaluate import EvaluateLength
from relpos_fairseq.core.placement import PositionMismatchError
from relpos_fairseq.evaluation.length import evaluate

TINY = "--decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-attention-heads 2 --decoder-layers 2".split()
TRAIN = """--task language_modeling --optimizer relpos_adam --lr 5e-3 --tokens-per-sample 24 --max-tokens 200
    --max-update 40 --log-interval 20 --distributed-world-size 1 --no-epoch-checkpoints""".split()
LENGTH = 12  # of generated sentences, prompts included
ADAPTIVE = "--adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20 --criterion adaptive_loss"
ADAPTIVE += " --ddp-backend legacy_ddp"
OURS = "--arch relpos_transformer_lm_tiny --position-scheme"
MODELS = {
    "lm": f"{OURS} m4",
    "wiki103": f"--arch relpos_transformer_lm_wiki103 --position-scheme alibi {ADAPTIVE}",
    "fire": f"{OURS} fire --position-fire-threshold 6",
    "rope": f"{OURS} rope --position-rope-pairs halves --position-rope-share 0.5",
    "pope": f"{OURS} pope",
    "xpos": f"{OURS} xpos",
    "xl": f"--arch relpos_transformer_xl_wt103_base {ADAPTIVE} --lr-scheduler cosine --max-update 200",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences that count through forty words, binarised."""
    folder = tmp_path_factory.mktemp("lm")
    generator = random.Random(0)
    files = []
    for split, count in (("train", 200), ("valid", 29), ("test", 37)):
        lines = []
        for _ in range(count):
            first = generator.randrange(40)
            words = (f"w{(first + i) % 40}" for i in range(generator.randint(2, 10)))
            lines.append(" ".join(words))
        (folder / split).write_text("\n".join(lines) + "\n")
        files += [f"--{split}pref", folder / split]
    call("preprocess", "--only-source", *files, "--destdir", folder / "bin", "--workers", "1")
    return folder / "bin"


def train(data: Path, folder: Path, *more: str | Path) -> str:
    return call("train", data, "--user-dir", USER_DIR, *TRAIN, *TINY, *QUIET, "--save-dir", folder, *more)


@pytest.fixture(scope="module", params=MODELS)
def trained(request, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each model."""
    folder = tmp_path_factory.mktemp(request.param)
    out = train(text, folder, *MODELS[request.param].split())
    losses = [float(x) for x in re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", out)]
    assert losses[-1] < losses[0]
    return folder / "checkpoint_best.pt"


def by_whole_passes(model: torch.nn.Module, prompt: torch.Tensor, longest: int) -> list[int]:
    """The likeliest continuation, without any cache.

    As fairseq's generator: --min-len holds from the end of the batch's longest prompt on.
    """
    tokens = prompt
    while tokens.size(1) <= LENGTH:
        log_probs = model.get_normalized_probs(model(tokens), True)[0, -1]
        log_probs[1] = -torch.inf  # padding
        if tokens.size(1) > longest:
            log_probs[2] = -torch.inf
        tokens = torch.cat([tokens, log_probs.argmax().view(1, 1)], dim=1)
        if tokens[0, -1] == 2:
            return tokens[0, 1:-1].tolist()
    return tokens[0, 1:].tolist()


def test_eval_lm_and_its_context_window(text: Path, trained: Path) -> None:
    """Perplexity of every token of the test set, with more context than without."""
    found = []
    for window in ("0", "12"):
        of = f"--gen-subset test --tokens-per-sample 16 --context-window {window} --batch-size 4"
        out = cli.evaluate("eval_lm", text, trained, *of.split())
        tokens = sum(len(line.split()) + 1 for line in (text.parent / "test").read_text().splitlines())
        assert f"Evaluated {tokens:,} tokens" in out
        found.append(float(re.search(r"Perplexity: ([\d.]+)", out)[1]))
    assert found[1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["lm", "xl"], indirect=True)
def test_two_processes_evaluate_as_one(text: Path, trained: Path, tmp_path: Path) -> None:
    """Fairseq would print the perplexity of the first one's half of the text."""
    flags = [text, "--user-dir", USER_DIR, "--path", trained, "--batch-size", "3", "--tokens-per-sample", "24", *QUIET]
    one, two = call("eval_lm", *flags), by_two("eval_lm", *flags, log=tmp_path / "log")
    read = re.compile(r"Evaluated [\d,]+ tokens|Loss .*")
    assert read.findall(two) == read.findall(one) and len(read.findall(one)) == 2


def test_generation_is_the_full_forward(text: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq-interactive and sample() with prompts of different lengths, beside no cache."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(trained)])
    model.eval()
    words = task.source_dictionary
    prompts = ["w3 w4 w5", "w30 w31 w32 w33 w34", "w7"]
    expected = []
    for prompt in prompts:
        ids = words.encode_line(prompt, append_eos=False, add_if_not_exist=False).long()
        with torch.no_grad():
            row = by_whole_passes(model, torch.cat([torch.tensor([2]), ids])[None], 5)
        expected.append(words.string(row))
    monkeypatch.setattr("fileinput.input", lambda **_: contextlib.nullcontext(prompts))
    search = f"--beam 1 --buffer-size 3 --batch-size 3 --min-len {LENGTH} --max-len-b {LENGTH}"
    out = cli.evaluate("interactive", text, trained, "--task", "language_modeling", *search.split())
    hypotheses = dict(re.findall(r"^H-(\d)\t\S+\t(.*)$", out, re.MULTILINE))
    assert [hypotheses[str(number)] for number in range(3)] == expected
    hub = type(model).from_pretrained(str(trained.parent), trained.name, str(text))
    assert hub.sample(prompts, beam=1, min_len=LENGTH, max_len_b=LENGTH) == expected


def test_flags_of_a_size_switch_nothing_off(text: Path, tmp_path: Path) -> None:
    """`--adaptive-input` where a size has it already leaves it on; bool flags only switch on."""
    on = ("--adaptive-input", "--decoder-normalize-before")
    train(text, tmp_path, *MODELS["wiki103"].split(), *on, "--max-update", "1", "--no-save")


def test_restoring_another_model(text: Path, trained: Path, tmp_path: Path) -> None:
    """Training on from a checkpoint of another model ends with what differs."""
    with pytest.raises(ValueError, match="checkpoint of another model"):
        train(text, tmp_path, "--arch", "relpos_transformer_xl_tiny", "--restore-file", trained)


def test_other_angles_for_a_model_that_was_trained_without(text: Path, tmp_path: Path) -> None:
    """By fairseq's --model-overrides and by `relpos evaluate length --override`."""
    train(text, tmp_path, *"--arch relpos_transformer_lm_tiny --position-scheme rope --max-update 5".split())
    path, found = tmp_path / "checkpoint_last.pt", {}
    for scaling in ("none", "yarn", "linear"):
        fields = {"position_rope_scaling": scaling, "max_target_positions": 96}
        of = "--gen-subset test --tokens-per-sample 96 --sample-break-mode none --batch-size 1"
        out = cli.evaluate("eval_lm", text, path, *of.split(), "--model-overrides", str(fields))
        found[scaling] = float(re.search(r"Perplexity: ([\d.]+)", out)[1])
    assert len(set(found.values())) == 3
    rows = {}
    for scaling in ("none", "yarn"):
        given = {"checkpoint": path, "data": text, "out": tmp_path / scaling, "split": "test"}
        override = (f"position_rope_scaling={scaling}",)
        options = EvaluateLength(**given, lengths=[24, 96], tokens=96, override=override)
        evaluate(options)
        rows[scaling] = (options.out / "length.csv").read_text().splitlines()
    assert rows["none"][1].split(",")[4] == rows["yarn"][1].split(",")[4]  # as long as in training
    assert rows["none"][2].split(",")[4] != rows["yarn"][2].split(",")[4]
    given = {"checkpoint": path, "data": text, "out": tmp_path / "no"}
    for override, message in (("scheme=m4", "no such field"), ("scheme", "must be FIELD=VALUE")):
        with pytest.raises(ValueError, match=message):
            evaluate(EvaluateLength(**given, override=(override,)))
    with pytest.raises(PositionMismatchError, match="rope_pairs=halves"):
        halves = ("position_rope_pairs=halves",)
        evaluate(EvaluateLength(**given, split="test", override=halves))
