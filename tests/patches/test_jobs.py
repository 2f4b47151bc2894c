"""Jobs of a hydra sweep write to folders of their own, and no training knows the one before it in its process."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import fairseq_cli.hydra_train  # noqa: F401  a process that it starts for a GPU has it too
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import BufferedIterator
from fairseq.logging import metrics, progress_bar
from fairseq_cli import train
from hydra.core.hydra_config import HydraConfig
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict

import relpos_fairseq  # noqa: F401
from helpers import FULL, ROOT, USER_DIR, recipes
from helpers import commands as cli
from helpers.commands import Corpus
from relpos_fairseq.patches.jobs import begin, forget, name_of

RECIPES = sorted(
    path for path in ROOT.glob("examples/*/config/**/*.yaml") if "ot launched itself" not in path.read_text()
)
TINY = cli.CONFIGS / "tiny.yaml"
SOME = RECIPES if FULL else sorted({TINY, *RECIPES[::9]})
SWEEP = ("common.seed=1,2", "model.position_scheme=shaw,t5")
JOBS = [[f"common.seed={seed}", f"model.position_scheme={scheme}"] for seed in (1, 2) for scheme in ("shaw", "t5")]


def hydra_train(corpus: Corpus, folder: Path, *more: str) -> str:
    """What fairseq-hydra-train says of a sweep over the small recipe, which ends after two updates."""
    return cli.command(
        *("fairseq-hydra-train", "-m", "--config-dir", cli.CONFIGS, "--config-name", "tiny"),
        *(f"task.data={corpus.binary}", "task.source_lang=src", "task.target_lang=tgt", f"common.user_dir={USER_DIR}"),
        *("common.cpu=true", "dataset.num_workers=0", "common.log_file=logs/train.log", "model.encoder_layers=1"),
        *("model.decoder_layers=1", *more),
        cwd=folder,
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sweep_trains_its_jobs_apart(corpus: Corpus, tmp_path: Path) -> None:
    """Each from its own seed, into its own folder and log, from where the same sweep goes on."""
    hydra_train(corpus, tmp_path, "optimization.max_update=1", *SWEEP)
    folders = {",".join(job): tmp_path / "checkpoints" / "tiny" / ",".join(job) for job in JOBS}
    assert set((tmp_path / "checkpoints" / "tiny").iterdir()) == set(folders.values())
    before = {name: cli.load(folder / "checkpoint_last.pt") for name, folder in folders.items()}
    for name, state in before.items():
        assert state["cfg"]["checkpoint"]["save_dir"] == f"checkpoints/tiny/{name}"
        log = (tmp_path / "logs" / name / "train.log").read_text()
        assert log.count("done training") == 1 and [other for other in folders if f"tiny/{other}'" in log] == [name]
    one, two = (before[f"common.seed={seed},model.position_scheme=t5"]["model"] for seed in (1, 2))
    assert not torch.equal(one["encoder.embed_tokens.weight"], two["encoder.embed_tokens.weight"])
    said = hydra_train(corpus, tmp_path, "optimization.max_update=2", *SWEEP)
    assert said.count("Loaded checkpoint") == said.count("@ 1 updates)") == len(JOBS)


@pytest.fixture
def hydra_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Let hydra run a job: the overrides of its sweep, of itself and its number; None: a single run."""

    def run(cfg: DictConfig, asked: list[str], overrides: list[str], number: int | None) -> DictConfig:
        cfg = cfg.copy()
        recipe = {"overrides": {"task": asked}, "sweep": {"subdir": "${hydra.job.num}"}}
        OmegaConf.save({"hydra": recipe}, tmp_path / "multirun.yaml")
        with open_dict(cfg):
            cfg.hydra.overrides.task = overrides
            cfg.hydra.runtime.output_dir = str(tmp_path / "0")
            if number is not None:
                cfg.hydra.job.num = number
        monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
        begin(lambda cfg: None, cfg)
        return cfg

    return run


@pytest.mark.parametrize("path", SOME, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_every_recipe_has_a_folder_for_each_job(path: Path, hydra_runs) -> None:
    """A run that is no job of a sweep, and a sweep of one, write where the recipe says."""
    cfg = recipes.composed(path.parent, path.stem, hydra=True)
    shared = cfg.checkpoint.save_dir
    fixed = ["common.cpu=true", "task.data=/data"]  # hydra says True of them to a job
    told = ["common.cpu=True", "task.data=/data"]
    found = [hydra_runs(cfg, [*fixed, *SWEEP], [*told, *job], n).checkpoint.save_dir for n, job in enumerate(JOBS)]
    assert found == [f"{shared}/{','.join(job)}" for job in JOBS]
    assert hydra_runs(cfg, [], [*fixed, *JOBS[0]], None).checkpoint.save_dir == shared
    assert hydra_runs(cfg, fixed, told, 0).checkpoint.save_dir == shared


def test_equal_jobs_are_refused(hydra_runs) -> None:
    """Two that a launcher runs at once would write the same files."""
    cfg = recipes.composed(TINY.parent, TINY.stem, hydra=True)
    with pytest.raises(ValueError, match=r"common.seed=1,2,1 has two jobs of one folder: give each value once"):
        hydra_runs(cfg, ["common.seed=1,2,1"], ["common.seed=2"], 1)
    ranged = hydra_runs(cfg, ["common.seed=range(1,4)", "lr_scheduler.warmup_updates=5"], ["common.seed=2"], 1)
    assert ranged.checkpoint.save_dir == "checkpoints/tiny/common.seed=2"


@pytest.mark.parametrize(
    ("asked", "told", "own", "expected"),
    [
        ("ck/${model.position_scheme}", r"ck/$\{model.position_scheme\}", "ck/t5", "ck/t5/common.seed=1"),
        ("ck/${hydra:job.override_dirname}", r"ck/$\{hydra\:job.override_dirname\}", "ck/a=1,b=2", "ck/a=1,b=2"),
        ("ck/${task.data}", r"ck/$\{task.data\}", "ck/data", f"ck/data/{','.join(JOBS[1])}"),
        ("one,two", "two", "two", f"two/{','.join(JOBS[1])}"),
        ("ck", "ck", "{output}/ck", "{output}/ck"),
    ],
)
def test_jobs_that_have_folders_keep_them(asked, told, own, expected, hydra_runs, tmp_path: Path) -> None:
    """A save_dir that is made of what is swept holds what the same sweep trained before; so does hydra's own folder."""
    places = [place.format(output=tmp_path / "0") for place in (own, expected)]
    cfg = recipes.composed(TINY.parent, TINY.stem, f"checkpoint.save_dir='{places[0]}'", hydra=True)
    jobs = [f"checkpoint.save_dir={asked}", *SWEEP], [f"checkpoint.save_dir={told}", *JOBS[1]]
    assert hydra_runs(cfg, *jobs, 1).checkpoint.save_dir == places[1]


def test_all_that_a_job_writes_is_its_own(hydra_runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute folders too, and what lies within that of checkpoints lies within the job's; once."""
    ended: list[bool] = []
    run = SimpleNamespace(run="the job's before", finish=lambda: ended.append(True))
    monkeypatch.setattr(progress_bar, "wandb", run)
    job = "model.position_scheme=rope/none"
    own = "model.position_scheme=rope%2Fnone"
    where = [f"common.log_file={tmp_path}/logs/a.log", "common.tensorboard_logdir=${checkpoint.save_dir}/board"]
    more = (f"checkpoint.save_dir={tmp_path}/here", *(f"++{one}" for one in where))
    cfg = recipes.composed(TINY.parent, TINY.stem, *more, hydra=True)
    made = hydra_runs(cfg, [f"{job},t5"], [job], 1)
    begin(lambda cfg: None, made)
    assert made.checkpoint.save_dir == f"{tmp_path}/here/{own}"
    assert made.common.tensorboard_logdir == f"{tmp_path}/here/{own}/board"
    assert made.common.log_file == f"{tmp_path}/logs/{own}/a.log" and Path(made.common.log_file).parent.is_dir()
    assert ended == [True]


def test_a_process_of_a_gpu_knows_its_job(hydra_runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra is in the process that started it alone; without hydra's files beside the log there is no telling."""
    composed = recipes.composed(TINY.parent, TINY.stem, hydra=True)
    OmegaConf.save(hydra_runs(composed, ["common.seed=1,2"], ["common.seed=2"], 1), tmp_path / "hydra.yaml")
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setattr(sys, "argv", ["fairseq-hydra-train", "--multirun"])
    cfg = recipes.composed(TINY.parent, TINY.stem)
    with open_dict(cfg):
        cfg.job_logging_cfg = {"handlers": {"file": {"filename": str(tmp_path / "0" / "hydra_train.log")}}}
    with pytest.raises(ValueError, match=r"checkpoints/tiny would be that of all jobs .*: leave hydra.output_subdir"):
        begin(lambda cfg: None, cfg)
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    (tmp_path / "hydra.yaml").rename(tmp_path / "0" / ".hydra" / "hydra.yaml")
    begin(lambda cfg: None, cfg)
    assert cfg.checkpoint.save_dir == "checkpoints/tiny/common.seed=2"


@given(st.lists(st.lists(st.text(min_size=1), max_size=3, unique=True).map(sorted), min_size=2, unique_by=tuple))
@example([["a=learned+m4"], ["a=rope/none"], ["a=rope none"], ["a=[1,2]"], ["a=rope%2Fnone"], ["+a=é" * 99, "b=1"]])
@example([["a=" + "x" * 300], ["a=" + "x" * 301]])
def test_names_of_jobs_are_names_of_files(jobs: list[list[str]]) -> None:
    names = [name_of(job) for job in jobs]
    assert len(set(names)) == len(jobs)
    assert all(len(name.encode()) <= 255 and not set("/\0 :*") & set(name) for name in names)


def test_a_training_begins_anew(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the one before it in this process: its best, its patience, meters, log and TensorBoard's files."""
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    given = ("--max-epoch", "2", "--patience", "1")
    cli.train(corpus, tmp_path / "one", *given, "--log-file", logs[0])
    before, closed = logs[0].read_text(), []
    assert any(isinstance(handler, logging.FileHandler) for handler in train.logger.handlers)
    checkpoint_utils.save_checkpoint.best = train.should_stop_early.best = 0.0
    train.should_stop_early.num_runs = 1
    with metrics.aggregate("train"):
        metrics.log_scalar("left_over", 1.0)
    writers = {"train": SimpleNamespace(close=lambda: closed.append(True))}
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", writers, raising=False)
    said = cli.train(corpus, tmp_path / "two", *given, "--log-file", logs[1])
    saved = cli.load(tmp_path / "two" / "checkpoint_last.pt")["extra_state"]
    assert saved["best"] == saved["val_loss"] > 0 and saved["train_iterator"]["epoch"] == 3
    assert "early stop" not in said and "left_over" not in said
    assert closed and not writers and logs[0].read_text() == before and "done training" in logs[1].read_text()


def test_no_thread_of_a_training_reads_on_in_the_next() -> None:
    """One that waits for room in its queue, as after `--max-update`."""
    reader = BufferedIterator(1, list(range(100)))
    next(reader)
    assert reader._consumer.is_alive()
    forget()
    assert not reader._consumer.is_alive()


def test_a_program_that_is_the_module_is_patched(corpus: Corpus, tmp_path: Path) -> None:
    """`python -m`, and torchrun of the file: patience counts there, too."""
    given = cli.train_arguments(corpus, tmp_path, "--lr", "0", "--patience", "1", "--max-epoch", "2")
    cli.command("python", "-m", "fairseq_cli.train", *given)
    assert cli.load(tmp_path / "checkpoint_last.pt")["extra_state"]["patience_runs"] == 1


def test_patience_counts_over_restarts(corpus: Corpus, tmp_path: Path) -> None:
    """A training that is restarted after each epoch, and learns nothing, stops as one that is not."""
    given = ("--lr", "0", "--patience", "2", "--validate-interval", "1")
    said = [cli.train(corpus, tmp_path, *given, "--max-epoch", f"{epoch}") for epoch in (1, 2, 3)]
    assert ["early stop since" in one for one in said] == [False, False, True]
    state = cli.load(tmp_path / "checkpoint_last.pt")
    assert state["extra_state"]["patience_runs"] == 2
    assert state["extra_state"]["patience_best"] == state["extra_state"]["best"]
    anew = cli.train(corpus, tmp_path, *given, "--max-epoch", "1", "--reset-meters", "--reset-dataloader")
    assert "early stop" not in anew


def test_an_epoch_ends_at_an_update_that_is_saved(corpus: Corpus, tmp_path: Path) -> None:
    """Its checkpoint is written, and takes the place of the one before it."""
    given = ("--save-interval-updates", "9", "--keep-interval-updates", "1", "--max-epoch", "2")
    said = cli.train(corpus, tmp_path, *given)
    assert "num_updates 18" in said
    assert sorted(path.name for path in tmp_path.glob("checkpoint_?_*.pt")) == ["checkpoint_2_18.pt"]
    last, update = (cli.load(tmp_path / f"checkpoint_{name}.pt") for name in ("last", "2_18"))
    assert last["extra_state"]["train_iterator"] == update["extra_state"]["train_iterator"]
    assert all(torch.equal(update["model"][name], value) for name, value in last["model"].items())
