"""fairseq's commands as several processes: one model, and the numbers of one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from fairseq.dataclass.initialize import add_defaults
from fairseq_cli.hydra_train import _hydra_main

import relpos_fairseq  # noqa: F401
from helpers import commands as cli
from helpers import recipes
from helpers.commands import QUIET, USER_DIR, Corpus
from relpos_fairseq.patches import processes

STILL = ("--position-scheme", "t5", "--dropout", "0", "--max-tokens", "200", "--max-update", "3")


def assert_same_model(one: Path, two: Path) -> None:
    """Compare the parameters of the last checkpoints of two folders."""
    expected, found = (cli.load(folder / "checkpoint_last.pt")["model"] for folder in (one, two))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_two_nodes_train_one_model(corpus: Corpus, tmp_path: Path) -> None:
    """With half of a process's batch each, as one process with two batches an update."""
    cli.train(corpus, tmp_path / "one", *STILL, "--update-freq", "2")
    first, second = cli.on_two_nodes(
        "train", *cli.train_arguments(corpus, tmp_path / "two", *STILL), log=tmp_path / "log"
    )
    assert "training on 2 devices" in first and "training on" not in second
    assert "Warning" not in first + second
    assert_same_model(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_hydra_trains_one_model(corpus: Corpus, tmp_path: Path) -> None:
    """It loads the plugin after fairseq has asked how processes meet."""

    def recipe(folder: str) -> list[str]:
        where = f"task.data={corpus.binary} checkpoint.save_dir={tmp_path / folder} task.source_lang=src"
        how = "common.cpu=true dataset.num_workers=0 dataset.max_tokens=200 optimization.max_update=3"
        return f"{where} task.target_lang=tgt model.position_scheme=t5 {how}".split()

    twice = (*recipe("one"), "optimization.update_freq=[2]", f"common.user_dir={USER_DIR}")
    with cli.captured():
        _hydra_main(recipes.composed(cli.CONFIGS, "tiny", *twice))
    said = cli.torchrun("fairseq-hydra-train", "--config-dir", cli.CONFIGS, "--config-name", "tiny", *recipe("two"))
    assert said.count("training on 2 devices") == said.count("training on") == 1
    assert said.count("Saved checkpoint") == 1
    assert_same_model(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_hydras_memory_efficient_types(kind: str) -> None:
    """What the parser of fairseq-train does: without it the model trains in fp32, and nobody says so."""
    cfg = recipes.composed(cli.CONFIGS, "tiny", f"common.memory_efficient_{kind}=true")
    other = {"fp16": "bf16", "bf16": "fp16"}[kind]
    processes.add_defaults(add_defaults, cfg)
    assert cfg.common[kind] and not cfg.common[other]


@pytest.mark.slow
def test_layers_are_dropped_on_two_processes(corpus: Corpus, tmp_path: Path) -> None:
    """Each process drops its own layers; fairseq stops where their gradients do not agree afterwards."""
    dropped = ("--encoder-layerdrop", "0.5", "--decoder-layerdrop", "0.5", "--max-update", "8")
    said = cli.by_two("train", *cli.train_arguments(corpus, tmp_path, *STILL, *dropped), log=tmp_path / "log")
    assert "num_updates: 8 >= max_update" in said


@pytest.mark.slow
def test_two_processes_validate_as_one(corpus: Corpus, tmp_path: Path) -> None:
    """Three batches: one process has an empty one."""
    cli.train(corpus, tmp_path, *STILL)
    path = tmp_path / "checkpoint_last.pt"
    flags = [corpus.binary, "--user-dir", USER_DIR, "--path", path, *QUIET, "--task", "translation"]
    flags += ["--max-tokens", "200", "--log-format", "simple", "--log-interval", "1000"]
    one, two = cli.call("validate", *flags), cli.by_two("validate", *flags, log=tmp_path / "log")
    (expected,) = cli.losses(one, "valid")
    assert set(cli.losses(two, "valid")) == {expected}
    assert "Warning" not in two


def test_no_process_repeats_a_translation(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cli.places_of(2)[1].items():
        monkeypatch.setenv(name, value)
    flags = cli.generate_arguments(corpus, Path("absent.pt"), "--task", "translation")
    for tool in ("generate", "interactive"):
        with pytest.raises(ValueError, match=r"each of torchrun's 2 processes would write all translations: .*--shard"):
            cli.call(tool, *flags)


@pytest.mark.slow
def test_shards_are_parts_of_a_data_set(corpus: Corpus, tmp_path: Path) -> None:
    cli.train(corpus, tmp_path, *STILL)
    flags = cli.generate_arguments(corpus, tmp_path / "checkpoint_last.pt")
    parts = [cli.hypotheses(cli.call("generate", *flags, "--num-shards", "2", "--shard-id", f"{n}")) for n in (0, 1)]
    whole = cli.hypotheses(cli.call("generate", *flags))
    assert all(parts) and sorted(map(str, [*parts[0], *parts[1]])) == sorted(map(str, whole))
    with pytest.raises(ValueError, match=r"--shard-id 2: give 0 to 1 \(--num-shards\)"):
        cli.call("generate", *flags, "--num-shards", "2", "--shard-id", "2")
    with pytest.raises(ValueError, match="give it a part of them in place of --num-shards"):
        cli.call("interactive", *flags, "--num-shards", "2")


@pytest.mark.parametrize("said", ["by passing find_unused_parameters=True to", "something else"])
def test_the_flag_for_unused_parameters_is_named(said: str) -> None:
    def step(self: object, samples: list) -> None:
        raise RuntimeError(said)

    error, match = (ValueError, "--find-unused-parameters") if "unused" in said else (RuntimeError, said)
    with pytest.raises(error, match=match):
        processes.train_step(step, None, [])


def test_a_thread_that_reads_ahead_ends_with_the_process(tmp_path: Path) -> None:
    """While torch makes a batch in it; and one that waits for room in its queue."""
    script = tmp_path / "read.py"
    script.write_text(
        """
import fairseq_cli.train
import pytest
import torch
import relpos_fairseq
from fairseq.data.iterators import BufferedIterator

class Busy:
    def __len__(self): return 10**6
    def __iter__(self):
        while True:
            yield torch.randn(300, 300) @ torch.randn(300, 300)

readers = [BufferedIterator(size, Busy()) for size in (10**5, 1)]
for _ in range(20):
    print(*(len(next(reader)) for reader in readers))
"""
    )
    # -B begins it anew: a fork ends without Python's own end.  It raises where the status is another than 0.
    said = cli.command("python", "-B", script)
    assert said.count("300 300") == 20
    assert "terminate" not in said


def test_a_training_leaves_no_temporary_folder(corpus: Corpus, tmp_path: Path) -> None:
    """A worker's batches go through a socket in a temporary folder, and training ends before its data do."""
    given = cli.train_arguments(corpus, tmp_path / "out", *STILL, "--num-workers", "1")
    with tempfile.TemporaryDirectory() as temporary:  # a socket's path has 107 bytes at most
        cli.command("fairseq-train", *given, TMPDIR=temporary)
        assert not list(Path(temporary).glob("pymp-*"))
