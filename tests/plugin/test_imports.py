"""Which modules importing a part loads, in processes of their own, and that the plugin registers.

The pure parts load torch at most; fairseq and this package may be imported in either order.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import relpos_fairseq
from helpers import ROOT, USER_DIR
from relpos_fairseq import plugin

PURE = ("attention", "schemes", "text", "io", "preparation")
NEED_FAIRSEQ = ("__main__", "plugin")
SHOW = """
import json, sys
loaded = [name for name in ("torch", "fairseq", "relpos_fairseq.plugin") if name in sys.modules]
names = [] if "fairseq" not in sys.modules else [
    name for registry in (
        sys.modules["fairseq.models"].ARCH_MODEL_REGISTRY,
        sys.modules["fairseq.tasks"].TASK_REGISTRY,
        sys.modules["fairseq.registry"].REGISTRIES["criterion"]["registry"],
        sys.modules["fairseq.registry"].REGISTRIES["optimizer"]["registry"],
    ) for name in registry
]
print(json.dumps([loaded, names]))
"""
OURS = {
    *("relpos_transformer", "relpos_transformer_lm", "relpos_transformer_xl", "relpos_roberta"),
    *("segment_language_modeling", "question_answering", "sentence_prediction_glue"),
    *("relpos_adam", "relpos_cross_entropy", "relpos_label_smoothed_cross_entropy"),
}
BY_FLAG = (
    "from fairseq.utils import import_user_module; from argparse import Namespace; "
    f"import_user_module(Namespace(user_dir={str(USER_DIR)!r}))"
)


def after(*statements: str) -> tuple[list[str], set[str]]:
    """What a process has loaded after some statements, and the names that fairseq knows."""
    run = [sys.executable, "-W", "ignore", "-c", "\n".join((*statements, SHOW))]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    loaded, names = json.loads(done.stdout.splitlines()[-1])
    return loaded, set(names)


def test_public_names_are_there_and_say_what_they_are() -> None:
    """Each has a docstring whose first line is a sentence; the package that lists them has loaded none."""
    assert after("import relpos_fairseq", "assert {'convert', '__version__'} <= set(dir(relpos_fairseq))")[0] == []
    for name in relpos_fairseq.PUBLIC:
        found = getattr(relpos_fairseq, name)
        assert found.__name__ == name and (found.__doc__ or "").strip().split("\n")[0].endswith(".")
    page = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in page for name in relpos_fairseq.PUBLIC)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        relpos_fairseq.nothing  # noqa: B018


def test_the_package_alone_loads_nothing() -> None:
    assert after("import relpos_fairseq")[0] == []


METRICS = """
import gc, sys
import relpos_fairseq
relpos_fairseq.is_command = COMMAND
import fairseq
assert gc.isenabled() and (gc.get_freeze_count() > 0) == COMMAND
for name in ("sklearn", "sklearn.metrics", "scipy.stats"):
    assert (name in sys.modules) != COMMAND
from fairseq.criterions import sentence_prediction
from fairseq.tasks import audio_classification
from relpos_fairseq.criterions import sentence_prediction_glue
assert sentence_prediction.f1_score([0, 1], [0, 1]) == 1.0
assert audio_classification.sklearn_metrics.accuracy_score([0, 1], [0, 0]) == 0.5
assert sentence_prediction_glue.pearsonr([1, 2, 3], [3, 2, 1]).statistic < -0.999
"""


@pytest.mark.parametrize("command", [True, False])
def test_a_command_imports_what_computes_metrics_when_it_is_called(command: bool) -> None:
    """scikit-learn and SciPy, by tasks and criterions of fairseq's and ours; a host's process stays as it was."""
    after(METRICS.replace("COMMAND", str(command)))


@pytest.mark.slow
def test_pure_parts_load_torch_alone() -> None:
    """Every module of the pure parts in one process; then fairseq comes, and the plugin with it."""
    found = list(pkgutil.iter_modules([str(USER_DIR)], "relpos_fairseq."))
    modules = [one.name for one in found if not one.ispkg]
    modules.append("relpos_fairseq.conversion")
    for part in PURE:
        folder = USER_DIR.joinpath(*part.split("."))
        modules += [one.name for one in pkgutil.walk_packages([str(folder)], f"relpos_fairseq.{part}.")]
    modules = [name for name in modules if not name.endswith(NEED_FAIRSEQ)]
    assert len(modules) > 50
    pure = "assert 'fairseq' not in sys.modules, name"
    tries = f"for name in {modules}:\n    importlib.import_module(name)\n    {pure}"
    loaded, names = after("import importlib, sys", tries, "import fairseq")
    assert loaded == ["torch", "fairseq", "relpos_fairseq.plugin"]
    assert OURS <= names


ORDERS = {
    "fairseq, plugin": ("import fairseq", "import relpos_fairseq"),
    "user dir": (BY_FLAG,),
    "a model": ("import relpos_fairseq.models.relpos_transformer",),
    "a data set": ("import relpos_fairseq.data.streams.dataset",),
    "a conversion": ("import relpos_fairseq.saved.checkpoint",),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_plugin_registers(order: str) -> None:
    """Also where the first import of all is that of a file which needs fairseq."""
    loaded, names = after(*ORDERS[order])
    assert loaded == ["torch", "fairseq", "relpos_fairseq.plugin"]
    assert OURS <= names


def test_no_function_of_fairseq_is_replaced_twice() -> None:
    """But the one before which hydra-train meets other processes, and begins a job of a sweep."""
    found = Counter(row.theirs for row in plugin.replacements() if row.theirs.startswith("fairseq_cli."))
    modules = {module for name, module in sys.modules.items() if name.partition(".")[0] == "fairseq"}
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    for owner in modules | classes:
        for name, function in vars(owner).items():
            while inspect.isfunction(function):
                found[f"{owner.__name__}.{name}"] += function.__code__.co_filename == plugin.__file__
                function = getattr(function, "__wrapped__", None)
    assert found["fairseq.checkpoint_utils.load_checkpoint_to_cpu"] == 1
    assert [name for name, count in found.items() if count > 1] == ["fairseq_cli.train.add_defaults"]


def imported(file: Path) -> set[str]:
    """Names of the packages that a file imports when it is imported."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in names}


def test_fairseq_comes_before_files_that_need_it() -> None:
    """Registering imports these files, so none of them may be what imports fairseq first."""
    folders = ("criterions", "data", "inference", "patches", "metrics", "models", "modules", "optim")
    folders += ("tasks",)
    files = [file for folder in folders for file in USER_DIR.joinpath(folder).rglob("*.py")]
    needing = [file for file in files if "fairseq" in imported(file)]
    assert len(needing) > 30
    for file in needing:
        packages = [parent / "__init__.py" for parent in file.parents if parent != USER_DIR]
        inside = [init for init in packages if init.is_file() and USER_DIR in init.parents]
        assert any("fairseq" in imported(init) for init in inside), file


HOST = """
import json, logging, os, sys, warnings
import numpy, torch, sklearn.metrics  # what fairseq imports has habits of its own
def state():
    root = logging.getLogger()
    ours = [getattr(f[1], "pattern", f[1]) for f in warnings.filters if f[1] is not None]
    ours += [getattr(f[3], "pattern", f[3]) for f in warnings.filters if f[3] is not None and "hydra" in str(f[3])]
    hydra = os.environ.get("HYDRA_FULL_ERROR")
    return [root.level, len(root.handlers), sorted(ours), hydra, sys.excepthook is sys.__excepthook__]
before = state()
import relpos_fairseq, fairseq
from fairseq.models.transformer import TransformerModel
print(json.dumps([before, state()]))
"""


def test_a_host_program_keeps_its_logging_warnings_and_environment():
    """Importing the plugin and fairseq prints nothing, and changes nothing that the rest of a program sees."""
    done = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = json.loads(done.stdout)
    assert after == before
    assert "tensorboardX" not in done.stderr
