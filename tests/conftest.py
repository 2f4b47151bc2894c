"""What all tests share."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from _pytest.logging import catching_logs
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings

from helpers import FULL, quick_configs

if TYPE_CHECKING:
    from helpers.commands import Corpus
    from helpers.formats import Ways
    from helpers.shell import Shell

CLOCK_REALTIME_COARSE = 5  # Linux's, by which file systems tell the time
ROOT = Path(__file__).resolve().parent.parent
# The files that take longest, the longest first.  Processes that share the suite begin with them
# (scripts/test.sh), so that none is left with a long one while the others have nothing to do.
LONGEST = """
    test_mutations.py export/test_onnx.py cli/test_cli_translation.py recipes/test_recipes_resume.py
    attention/test_triton_attention.py cli/test_cli_traps.py export/test_transformers_releases.py
    nn/test_nn.py attention/test_error_budget.py faults/test_faults.py schemes/test_schemes.py
    tasks/test_segment_training.py comparison/test_compare.py export/test_closing_generation.py
    attention/test_triton_compile.py cli/test_cli_pruned.py
""".split()
# transformers copies an export's code to a folder by the export's name: two workers' would be written at once.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="relpos-modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must stand before anything imports triton
# The suite draws the same examples every time; `--hypothesis-profile default` draws new ones.
# A planted bug is to be seen, not understood: shrinking its example can take minutes.
hypothesis_settings.register_profile("repeatable", derandomize=True)
hypothesis_settings.register_profile(
    "planted", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)
hypothesis_settings.load_profile("repeatable")
# This environment's programs are not on PATH, whoever begins the suite: an activated one would hide a test that
# finds them there alone (helpers/commands.py adds them for the commands that it runs).
_programs = str(Path(sys.executable).parent)
os.environ["PATH"] = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != _programs)
# What commands of the suite write is remembered apart from what the user's wrote, and by none of an earlier suite.
# A worker of xdist has the folder of the process that began it, which outlives it.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="relpos_state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# The first backward pass of a process starts autograd's threads for what devices there are by then,
# after which no child may train.  On Python 3.13 an export to ONNX leaves one behind: be before it.
torch.ones(1, requires_grad=True).sum().backward()
# A loader that is collected together with its queues cannot tell its workers to end: torch kills each after this time.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # seconds, of 5
# No test cuts the power, which is all that files are written through for.
os.fsync = lambda descriptor: None
gc.disable()  # until all tests are collected: they stay, and a collection walks through all of them
# A command makes objects by the hundred thousand: by Python's own 700 it would walk through all a hundred times.
gc.set_threshold(10_000, 10, 10)


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker tell what is shown of a test: not its begin and end, nor, unless timed, that fixtures passed."""
    if "RELPOS_REACH" in os.environ:
        import reach

        config.pluginmanager.register(reach.Recorder())
    shown = config.option.durations is not None or config.option.xmlpath
    for worker in config.pluginmanager.get_plugins():
        if type(worker).__name__ != "WorkerInteractor":
            continue

        def send(name: str, tell: Callable[..., None] = worker.sendevent, **event: Any) -> None:
            passed = name == "testreport" and event["data"]["outcome"] == "passed" and event["data"]["when"] != "call"
            if name not in ("logstart", "logfinish") and (shown or not passed):
                tell(name, **event)

        worker.sendevent = send


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what `scripts/test.sh --changed` chose, skip what is the night's; the longest files come first."""
    if "RELPOS_CHANGED" in os.environ:
        chosen = set(Path(os.environ["RELPOS_CHANGED"]).read_text(encoding="utf-8").splitlines())
        left_out = [item for item in items if not {item.nodeid, item.nodeid.partition("::")[0]} & chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if {item.nodeid, item.nodeid.partition("::")[0]} & chosen]
    nightly = set((ROOT / "tests" / "nightly.txt").read_text(encoding="utf-8").splitlines())
    for item in items if not FULL else ():
        if item.nodeid in nightly or item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="runs each night: RELPOS_ONNX=full"))
    if hasattr(config, "workerinput"):
        rank = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """From here on, neither this process nor a fork of it collects what was there before."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _kept_by_files_before() -> None:
    """What the tests of earlier files left are modules and their tables, a second's walk in the end: they stay."""
    gc.collect()
    gc.freeze()
    _apart[:] = [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    ]


_apart: list[logging.Logger] = []  # loggers whose records do not reach the root's handlers


def _attach(self: catching_logs) -> logging.Handler:
    """Give pytest's handler to the loggers that need it: it would ask all 1,500, six times a test."""
    if self.level is not None:
        return _attach_asking_all(self)
    for logger in (logging.root, *_apart):
        logger.addHandler(self.handler)
        self.attached_loggers.append(logger)
    return self.handler


_attach_asking_all, catching_logs.__enter__ = catching_logs.__enter__, _attach


def _draw_anew() -> None:
    """What a test or a fixture draws hangs on nothing that ran before it in this process.

    `random` stays as it is: fairseq draws ports by it, which tests side by side must not share.
    """
    np.random.seed(1)
    torch.default_generator.manual_seed(1)  # torch.manual_seed looks for devices, a millisecond each time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(1)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    """Fixtures of a module are set up by whichever of its tests comes first."""
    _draw_anew()


def _let_integers_overflow() -> None:
    """Triton's interpreter looks for overflows in 64 bits, which takes two fifths of its time; each night it does."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and not FULL:
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)


def _wait_for_this_disks_clock() -> None:
    """A file that was written just now is asked for its state two ticks of this machine's clock later, not of any's."""
    files = sys.modules.get("relpos_fairseq.io.files")
    if files is not None and sys.platform == "linux":
        files.TICK = int(2e9 * time.clock_getres(CLOCK_REALTIME_COARSE))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """The test itself, after its fixtures."""
    _draw_anew()
    _let_integers_overflow()
    quick_configs.compose_by_differences()
    _wait_for_this_disks_clock()


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """What a command of a test did to this process's logging ends with the test.

    `relpos translate` and its like are quiet; `relpos compare` logs to a standard output of its
    own, where a later test would find each line twice; fairseq-preprocess logs into its folder.
    """
    root, preprocess = logging.getLogger(), logging.getLogger("fairseq_cli.preprocess")
    level, handlers = root.level, list(root.handlers)
    yield
    if root.level != level:  # which has every logger of all libraries ask anew
        root.setLevel(level)
    for logger, kept in ((root, handlers), (preprocess, [])):
        for handler in set(logger.handlers).difference(kept):
            logger.removeHandler(handler)
            handler.close()
    for logger in map(logging.getLogger, ("fairseq", "relpos_fairseq")):
        if logger.level:
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A binarised translation corpus for all tests of this process, which leave it as it is."""
    from helpers.commands import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def briefly(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints of two updates, one for each set of flags."""
    from helpers.commands import train

    @cache
    def checkpoint(*flags: str) -> Path:
        save_dir = tmp_path_factory.mktemp("briefly")
        train(corpus, save_dir, *flags, "--max-update", "2", "--disable-validation")
        return save_dir / "checkpoint_last.pt"

    return checkpoint


@pytest.fixture(scope="session")
def binary(corpus: Corpus) -> Path:
    """The folder of that corpus which fairseq reads."""
    return corpus.binary


@pytest.fixture(scope="session")
def translator(briefly: Callable[..., Path]) -> Path:
    """A checkpoint of a translation."""
    return briefly("--position-scheme", "m4")


@pytest.fixture(scope="session")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Characters for language models."""
    from helpers.segment_corpus import write_corpus

    return write_corpus(tmp_path_factory.mktemp("stream"))


@pytest.fixture(scope="session")
def recurrent(stream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a language model with memory."""
    from helpers.segment_corpus import train

    folder = tmp_path_factory.mktemp("recurrent")
    train(stream, folder, "--max-update", "6", "--keep-interval-updates", "1")
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def absolute(stream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a language model without memory, whose table has eight positions."""
    from helpers.commands import QUIET, USER_DIR, call
    from helpers.segment_corpus import TASK, TRAIN

    folder = tmp_path_factory.mktemp("absolute")
    model = "--arch relpos_transformer_lm_tiny --position-scheme learned --decoder-layers 1 --decoder-embed-dim 16"
    sizes = "--decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --max-update 4 --keep-interval-updates 1"
    flags = [*TASK, *TRAIN, *QUIET, *model.split(), *sizes.split()]
    call("train", stream, "--user-dir", USER_DIR, "--save-dir", folder, *flags)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of characters with memory, whose data are no more where its training had them."""
    from helpers.segment_corpus import character_model

    checkpoint, data = character_model(tmp_path_factory.mktemp("characters"))
    data.rename(data.parent / "moved")
    return checkpoint


@pytest.fixture
def shell(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """Lines of `relpos`, which run in tmp_path."""
    from helpers.shell import Shell

    monkeypatch.chdir(tmp_path)
    return Shell(request, capsys)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Nothing is kept for gradients."""
    with torch.no_grad():
        yield


@pytest.fixture
def opener_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process that opens folders, which begins in seconds, outlives a refusal where the folder's code is ours."""
    from relpos_fairseq.formats import closing_check

    begun = closing_check._opener
    kept = type("Kept", (list,), {"pop": lambda self: mock.Mock()})(begun)
    monkeypatch.setattr(closing_check, "_opener", kept)
    yield
    begun[:] = kept


@pytest.fixture
def ways(tmp_path: Path, capsys: pytest.CaptureFixture) -> Ways:
    """Conversions and exports from one folder of tmp_path to another."""
    from helpers.formats import Ways

    return Ways(tmp_path, capsys)


@pytest.fixture
def timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a benchmark times in processes of their own is timed in this one but with RELPOS_ONNX=full."""
    from relpos_fairseq.lab.benchmarks import sampling, serving

    for module in () if FULL else (sampling, serving):
        monkeypatch.setattr(module, "run_apart", lambda function, *given: function(*given))


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn and not rendered, which takes most of their time, but with RELPOS_ONNX=full."""
    from relpos_fairseq.plots import axes

    if not FULL:
        monkeypatch.setattr(axes, "save_figure", lambda figure, path: path.touch())


@pytest.fixture
def shared_data() -> Path:
    """The folder of real text that may lie beside the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real text: {folder} is absent")
    return folder
