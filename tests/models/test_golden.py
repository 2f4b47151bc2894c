"""Checkpoints of a release, one a model: they load, give its outputs, and training goes on."""

from __future__ import annotations

import shutil
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.utils import import_user_module
from torch import nn

from helpers.commands import USER_DIR, call, command, load, losses
from helpers.golden_models import CASES, KINDS, RESUMED, flags_of, outputs_of
from relpos_fairseq.saved.model import SavedModel

# The outputs are of order 1 to 10 and sums of some tens of products in fp32: processors that sum in
# another order differ by some 1e-6.  A wrong row of a table, or a wrong scale, shows in the first
# digits, for after two updates by a learning rate of 0.1 no table is near its neutral value.
EQUAL = {"rtol": 1e-5, "atol": 1e-5}
HUBS = {
    "translation": TransformerModel,
    "lm": TransformerLanguageModel,
    "xl": TransformerLanguageModel,
    "masked_lm": RobertaModel,
}


@pytest.fixture(scope="session")
def golden(tmp_path_factory) -> Path:
    """The archive, unpacked."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(Path(__file__).with_name("golden.tar.xz")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder)
    import_user_module(Namespace(user_dir=str(USER_DIR)))
    return folder


def data_of(golden: Path, case: str) -> Path:
    return golden / "data" / KINDS[case][0]


def assert_outputs(golden: Path, name: str, case: str, model: nn.Module) -> None:
    """The model's outputs are those that lie in the archive under a name."""
    expected = torch.load(golden / "outputs.pt", weights_only=True)[name]
    found = outputs_of(case, model)
    assert found.keys() == expected.keys() - {"resumed"}
    for part, value in found.items():
        torch.testing.assert_close(value, expected[part], **EQUAL, msg=lambda m, p=part: f"{p}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_checkpoint_gives_the_same_outputs(golden, case):
    path = golden / f"{case}.pt"
    assert "model" in torch.load(path, weights_only=True)
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data_of(golden, case))}
    )
    assert_outputs(golden, case, case, models[0])


@pytest.mark.parametrize("case", CASES)
def test_a_command_reads_every_number(golden, case, monkeypatch):
    """Where a model that generates is not filled before it is read, nothing of it is what lay in memory: NaN here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        model, _, _ = SavedModel.open(golden / f"{case}.pt").build({"data": str(data_of(golden, case))})
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert not value.isnan().any(), name
    assert_outputs(golden, case, case, model)


@pytest.mark.parametrize("case", HUBS)
def test_from_pretrained_gives_the_same_outputs(golden, case):
    hub = HUBS[case].from_pretrained(
        str(golden), f"{case}.pt", str(data_of(golden, case)), user_dir=str(USER_DIR), bpe=None
    )
    assert_outputs(golden, case, case, hub.models[0] if hasattr(hub, "models") else hub.model)


def test_converted_checkpoint_gives_the_same_outputs(golden):
    folder = golden / "converted"
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "model.pt")], arg_overrides={"data": str(folder)}
    )
    assert_outputs(golden, "converted", "masked_lm", models[0])


def resume(golden: Path, case: str, save_dir: Path) -> list[str | Path]:
    """The command line that goes on with a training for two updates."""
    save_dir.mkdir()
    shutil.copy(golden / f"{case}.pt", save_dir / "checkpoint_last.pt")
    paths = [data_of(golden, case), "--user-dir", USER_DIR, "--save-dir", save_dir]
    return [*paths, *flags_of(case), "--max-update", "4"]


def assert_went_on(golden: Path, case: str, save_dir: Path, log: str) -> None:
    """The losses of updates 3 and 4: those of the release, which has read Adam's moments."""
    expected = torch.load(golden / "outputs.pt", weights_only=True)[case]["resumed"]
    assert len(expected) == 2
    assert losses(log) == pytest.approx(expected.tolist(), abs=2e-3)
    history = load(save_dir / "checkpoint_last.pt")["optimizer_history"]
    assert history[-1]["num_updates"] == 4


@pytest.mark.parametrize("case", RESUMED)
def test_training_goes_on(golden, tmp_path, case):
    log = call("train", *resume(golden, case, tmp_path / "save"))
    assert_went_on(golden, case, tmp_path / "save", log)


@pytest.mark.slow
@pytest.mark.nightly  # as in this process, but by a command
def test_training_goes_on_by_the_command(golden, tmp_path):
    case = "translation"
    log = command("fairseq-train", *resume(golden, case, tmp_path / "save"))
    assert_went_on(golden, case, tmp_path / "save", log)
