"""Small RoBERTas of the tests, and the tiny data that they are trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from helpers.commands import USER_DIR, call
from relpos_fairseq.models.configs import RelPosRobertaConfig
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel

SMALL = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_layers": 2, "encoder_attention_heads": 2}
SMALL |= {"dropout": 0.0, "attention_dropout": 0.0}
SIZES = "--arch relpos_roberta_tiny --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 2"
ARCH = ["--user-dir", str(USER_DIR), *SIZES.split()]
OPTIMIZE = """--optimizer relpos_adam --lr 5e-3 --log-interval 1 --no-epoch-checkpoints --distributed-world-size 1
    --seed 3 --cpu --num-workers 0 --no-progress-bar""".split()
MASKED_LM = ["--task", "masked_lm", "--criterion", "masked_lm", "--batch-size", "8"]
WORDS = [f"w{number}" for number in range(24)]


def small_task(words: int = 20, longest: int = 12) -> SimpleNamespace:
    """A task with a dictionary of `words` words and <mask>."""
    dictionary = Dictionary()
    for number in range(words):
        dictionary.add_symbol(f"w{number}")
    dictionary.add_symbol("<mask>")
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        max_positions=lambda: longest,
        cfg=SimpleNamespace(data="."),
    )


def small_roberta(seed: int = 1, task: Any = None, **values: Any) -> RelPosRobertaModel:
    """A small model in evaluation mode."""
    config = RelPosRobertaConfig()
    for name, value in (SMALL | values).items():
        if not hasattr(config, name):
            raise AttributeError(f"no field {name}")
        setattr(config, name, value)
    torch.manual_seed(seed)
    return RelPosRobertaModel.build_model(config, task or small_task()).eval()


def tokens(rows: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    """Rows of `<s> ... </s> ... </s>`; row 1 is two tokens shorter, padded right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 24, (rows, length), generator=generator)
    ids[:, 0] = 0
    ids[:, 3] = ids[:, -1] = 2
    ids[1, -3] = 2
    ids[1, -2:] = 1
    return ids


def write_packed(folder: Path, sentences: int = 120) -> Path:
    """A data-bin of sentences for masked_lm, in documents that an empty line ends."""
    generator = random.Random(2)
    raw = folder / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", sentences), ("valid", 21)):
        lines = []
        for number in range(count):
            lines.append(" ".join(generator.choices(WORDS, k=generator.randint(1, 9))))
            if number % 5 == 4:
                lines.append("")
        (raw / f"{split}.txt").write_text("\n".join(lines) + "\n")
    files = ("--trainpref", raw / "train.txt", "--validpref", raw / "valid.txt", "--destdir", folder / "bin")
    call("preprocess", "--only-source", *files)
    return folder / "bin"


def write_pairs(folder: Path, labels: Sequence[str] = ("0", "1"), pairs: bool = True, regression: bool = False) -> Path:
    """A data-bin for sentence_prediction: is the first word of both sentences the same?"""
    generator = random.Random(4)
    raw, binary = folder / "raw", folder / "bin"
    raw.mkdir(parents=True)
    (binary / "label").mkdir(parents=True)
    for split, count in (("train", 60), ("valid", 21)):
        rows = [_pair(generator, labels) for _ in range(count)]
        for name, part in zip(("input0", "input1", "label"), zip(*rows, strict=True), strict=True):
            (raw / f"{split}.{name}").write_text("\n".join(part) + "\n")
        if regression:
            scores = (f"{generator.uniform(0, 5):.2f}" for _ in range(count))
            (binary / "label" / f"{split}.label").write_text("\n".join(scores) + "\n")
    dictionary = folder / "dict.txt"
    dictionary.write_text("".join(f"{word} 1\n" for word in WORDS))
    for name in ("input0", "input1", "label") if pairs else ("input0", "label"):
        words = [] if name == "label" else ["--srcdict", dictionary]
        files = ("--trainpref", raw / f"train.{name}", "--validpref", raw / f"valid.{name}")
        call("preprocess", "--only-source", *files, *words, "--destdir", binary / name)
    return binary


def _pair(generator: random.Random, labels: Sequence[str]) -> tuple[str, str, str]:
    first = generator.choices(WORDS, k=generator.randint(1, 7))
    second = generator.choices(WORDS, k=generator.randint(1, 7))
    return " ".join(first), " ".join(second), generator.choice(labels)
