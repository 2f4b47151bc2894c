"""Every shipped recipe trains, and killed at any update it resumes to the same checkpoint.

Recipes that differ in sizes, schemes and numbers alone resume alike: one of each kind does, each night all.

They train in forks of this process, shrunken to one layer and a few updates, with tasks,
criterions, optimizers, schedules, positions and savings of their own.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial, reduce
from pathlib import Path

import pytest
import torch
import torch._dynamo  # noqa: F401  the first optimizer does, in each fork if not here
from omegaconf import DictConfig, OmegaConf

import relpos_fairseq  # noqa: F401  registers the models
from helpers import FULL, ROOT, USER_DIR, recipes
from helpers.commands import assert_same_state, captured, load, write_corpus
from helpers.questions import make_data
from helpers.roberta import write_packed, write_pairs
from helpers.segment_corpus import write_corpus as write_stream

EXAMPLES = ROOT / "examples"
PATHS = sorted(path for path in EXAMPLES.glob("*/config/**/*.yaml") if "ot launched itself" not in path.read_text())
NAMES = [str(path.relative_to(EXAMPLES).with_suffix("")) for path in PATHS]
NIGHTLY = pytest.mark.nightly
RESUMED = [f"roberta/config/{name}" for name in ("glue/cola", "glue/sts_b", "pretraining/m4m_base", "squad")]
RESUMED += ["language_modeling/config/words", "translation/config/tiny"]
UPDATES = 7
SHAPE = {"embed_dim": 16, "ffn_embed_dim": 16, "layers": 1, "attention_heads": 2}
SIDES = ("encoder", "decoder")
SIDES_OF = {"translation": SIDES, "language_modeling": SIDES[1:]}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
POSITIONS = {"model.position_scheme": "shaw", "model.position_clip_distance": 3}
POSITIONS |= {"model.position_share": "heads", "model.attention_backend": "reference"}
# What makes the data of a task small.
OF_TASK = {
    "translation": "task.source_lang=src task.target_lang=tgt dataset.max_tokens=500",
    "masked_lm": "task.tokens_per_sample=24 dataset.batch_size=6 dataset.max_tokens=null",
    "sentence_prediction": "dataset.batch_size=16 dataset.valid_subset=valid task.max_positions=24",
    "question_answering": "dataset.batch_size=40 task.tokens_per_sample=48 task.doc_stride=12 task.max_query_length=12",
    "segment_language_modeling": "task.tokens_per_sample=8 model.mem_len=8 dataset.batch_size=2",
}
SMALL = [
    *("++common.cpu=true", "++common.fp16=false", "++common.bf16=false"),
    *("++dataset.num_workers=0", f"++common.user_dir={USER_DIR}"),
    f"++optimization.max_update={UPDATES}",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """A small data folder for every kind of task."""
    folder = tmp_path_factory.mktemp("recipes")
    packed = write_packed(folder / "packed")
    symbols = len((packed / "dict.txt").read_text().splitlines()) + 4
    (packed / "word_starts.txt").write_text("1\n" * symbols)
    return {
        "translation": write_corpus(folder / "translation").binary,
        "masked_lm": packed,
        "sentence_prediction": write_pairs(folder / "pairs"),
        "regression": write_pairs(folder / "scores", regression=True),
        "question_answering": make_data(folder / "qa", unanswerable=True),
        "segment_language_modeling": write_stream(folder / "stream"),
    }


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_recipes_say_how_they_are_launched(path: Path) -> None:
    """And where they save."""
    text = path.read_text()
    assert re.search(rf"--config-name {path.stem}\s", text.split("\nhydra:")[0])
    within = "glue/" if path.parent.name == "glue" else ""
    saved = "book" if path.stem == "shakespeare" else path.stem
    assert f"save_dir: checkpoints/{within}{saved} " in text


def composed(name: str, *overrides: str):
    """The config that fairseq-hydra-train makes of a recipe."""
    path = EXAMPLES / f"{name}.yaml"
    return recipes.composed(path.parent, path.stem, *overrides)


def changes(name: str) -> dict[str, object]:
    """What one changes of a recipe, without `++`: sizes, dropouts, positions, how it is scored."""
    part = name.split("/")[0]
    changed = {f"model.{side}_{key}": value for side in SIDES_OF.get(part, SIDES[:1]) for key, value in SHAPE.items()}
    changed |= dict.fromkeys((f"model.{key}" for key in DROPOUTS), 0.25) | POSITIONS
    if part == "translation":
        changed |= {"task.eval_bleu": True, "task.eval_bleu_remove_bpe": "sentencepiece"}
    return changed


@cache
def known(name: str) -> dict:
    """The config of a recipe of which one has changed that."""
    return OmegaConf.to_container(composed(name, *(f"{key}={value}" for key, value in changes(name).items())))


def shrunken(name: str, data: dict[str, Path]) -> list[str]:
    """The overrides that make a recipe small; a model's shape needs no `++`."""
    given = known(name)
    task = given["task"]["_name"]
    regression = task == "sentence_prediction" and given["criterion"]["regression_target"]
    more = [f"++task.data={data['regression' if regression else task]}", *SMALL]
    sides = SIDES_OF.get(name.split("/")[0], SIDES[:1])
    more += [f"model.{side}_{key}={value}" for side in sides for key, value in SHAPE.items()]
    more += [f"++lr_scheduler.warmup_updates={2 if task != 'segment_language_modeling' else 0}"]
    saving, optimized = given["checkpoint"], given["optimization"]
    where = {
        f"lr_scheduler.total_num_update={UPDATES}": "total_num_update" in given["lr_scheduler"],
        "checkpoint.save_interval_updates=2": (saving.get("save_interval_updates") or 0) > 0,
        "checkpoint.finetune_from_model=null": "finetune_from_model" in saving,
        "optimization.max_epoch=9": "max_epoch" in optimized,
        "optimization.update_freq=[2]": (optimized.get("update_freq") or [1])[0] > 1,
        "task.num_classes=2": task == "sentence_prediction" and not regression,
    }
    more += [f"++{value}" for value, needed in where.items() if needed]
    if "wt103" in name:
        more += [f"++model.adaptive_{side}_cutoff='6,9'" for side in ("input", "softmax")]
    return [*more, *(f"++{value}" for value in OF_TASK[task].split())]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_takes_what_one_changes(name):
    assert {key: reduce(dict.__getitem__, key.split("."), known(name)) for key in changes(name)} == changes(name)


def in_fork(config: DictConfig, save_dir: Path, at: int | None = None, do: Callable[[], object] | None = None) -> int:
    """Train by a config in a fork, which does something as an update begins, if asked for."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        from fairseq.trainer import Trainer
        from fairseq_cli.hydra_train import _hydra_main

        step = Trainer.train_step

        def counted(self, *args, **kwargs):
            if self.get_num_updates() == at:
                do()
            return step(self, *args, **kwargs)

        Trainer.train_step = counted
        with captured():
            config.checkpoint.save_dir = str(save_dir)
            _hydra_main(config)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in RESUMED else pytest.param(name, marks=NIGHTLY) for name in NAMES])
def test_a_killed_recipe_resumes_to_the_same_checkpoint(data, tmp_path, name):
    """What a kill would leave is copied while the recipe trains; the copy goes on from there."""
    config, whole, parts = composed(name, *shrunken(name, data)), tmp_path / "whole", tmp_path / "parts"
    kill_at = random.Random(name).randrange(3, UPDATES)
    copy = partial(shutil.copytree, whole, parts)
    assert in_fork(config, whole, kill_at, copy) == 0
    assert parts.exists()
    assert in_fork(config, parts) == 0
    saved = [folder / "checkpoint_last.pt" for folder in (whole, parts)]
    assert_same_state(*saved)
    states = [load(path) for path in saved]
    for found in states:
        assert found["optimizer_history"][-1]["num_updates"] == UPDATES
        model = found["cfg"]["model"]
        assert 16 in (model.get("encoder_embed_dim"), model.get("decoder_embed_dim"))
        assert found["last_optimizer_state"]["param_groups"] == states[0]["last_optimizer_state"]["param_groups"]
        assert found["extra_state"]["train_iterator"] == states[0]["extra_state"]["train_iterator"]


# Stands for fairseq-train: the script's own flags, then smaller ones; dies where it is told to.
TRAINER = """
import os, shutil, signal, sys
from fairseq.trainer import Trainer
step = Trainer.train_step
def counted(self, *args, **kwargs):
    if str(self.get_num_updates()) == os.environ.get("KILL_AT"):
        folders = os.environ.get("COPY", "").split()
        shutil.copytree(*folders) if folders else os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)
Trainer.train_step = counted
sys.argv += "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16".split()
sys.argv += "--decoder-attention-heads 2 --save-interval-updates 2 --warmup-updates 2".split()
from fairseq_cli.train import cli_main
cli_main()
"""
PYTHON = f'#!/bin/sh\ncase "$*" in *"evaluate length "*) exit 0 ;; *) exec {sys.executable} "$@" ;; esac\n'


@NIGHTLY
@pytest.mark.slow
def test_a_killed_script_resumes_to_the_same_checkpoint(tmp_path):
    """shakespeare.sh; the quickstart's stages are tested with it.

    What a kill would leave is copied while the whole one trains; each night (RELPOS_ONNX=full) one is killed.
    """
    (tmp_path / "trainer.py").write_text(TRAINER)
    trainer = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/trainer.py "$@"\n'
    for name, text in {"python": PYTHON, "fairseq-train": trainer}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    draw = random.Random(1)
    words = "the king of a land had three sons and gold".split()
    lines = (" ".join(draw.choices(words, k=8)) for _ in range(900))
    (tmp_path / "book.txt").write_text("\n".join(lines) + "\n")

    def run(out: str, **more: str) -> int:
        script = EXAMPLES / "language_modeling" / "shakespeare.sh"
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "UPDATES": "7"}
        command = ["bash", script, tmp_path / "book.txt", tmp_path / out, "alibi"]
        return subprocess.run(command, env=environment | more, stdout=subprocess.DEVNULL).returncode

    copied = {} if FULL else {"KILL_AT": "5", "COPY": f"{tmp_path / 'whole'} {tmp_path / 'parts'}"}
    assert run("whole", **copied) == 0
    assert not FULL or run("parts", KILL_AT="5") != 0
    assert not (tmp_path / "parts" / "alibi-7" / "finished").exists()
    assert run("parts") == 0
    assert_same_state(*(tmp_path / part / "alibi-7" / "checkpoint_last.pt" for part in ("whole", "parts")))
