"""`--ddp-backend fully_sharded`: the numbers, checkpoints and resumes of a training that is not sharded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import config, options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from helpers import commands as cli
from helpers import recipes
from helpers.commands import Corpus
from helpers.every_model import Made, roberta, translation
from helpers.lm_models import small_xl, stream
from helpers.models import randomized
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.patches import sharding
from relpos_fairseq.schemes import scheme_names

# An epoch has four batches, two updates of two.  Without shards two processes equal one to the bit; the norm that clips
# is summed over shards: eps keeps Adam from magnifying what that rounds of gradients near 0.
STILL = """--position-scheme t5 --dropout 0 --max-tokens 4000 --batch-size 104 --max-update 4 --clip-norm 0.5
    --adam-eps 1e-5 --no-last-checkpoints --save-interval-updates 2 --disable-validation""".split()
RATE = ("--position-lr-scale", "20")  # of relpos_adam
SHARDED = ("--ddp-backend", "fully_sharded")
EVERY_LAYER = ("--min-params-to-wrap", "0")


def saved(folder: Path, updates: int = 4) -> dict:
    """Return the checkpoint of a folder after a number of updates."""
    [path] = folder.glob(f"checkpoint_*_{updates}.pt")
    return cli.load(path)


def train(corpus: Corpus, folder: Path, processes: int, *flags: str, start: Path | None = None) -> dict:
    """Train on some processes, from another folder's checkpoint after two updates; return the last checkpoint."""
    if start is not None:
        folder.mkdir()
        [path] = start.glob("checkpoint_*_2.pt")
        shutil.copy(path, folder / "checkpoint_last.pt")
    twice = Corpus(corpus.raw, Path(f"{corpus.binary}:{corpus.binary}"))  # else fairseq keeps the first epoch's batches
    arguments = cli.train_arguments(twice, folder, *STILL, *(() if "adam" in flags else RATE), *flags)
    cli.forked_training(arguments, processes, folder.with_suffix(".log"))
    return saved(folder)


def assert_same(found: dict, expected: dict) -> None:
    """Compare parameters and moments to fp32's rounding, and the layout of two checkpoints."""
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["model"], expected["model"], atol=1e-5, rtol=1e-5)
    ours, theirs = found["last_optimizer_state"], expected["last_optimizer_state"]
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def sharded(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training that two processes share."""
    folder = tmp_path_factory.mktemp("sharded") / "two"
    train(corpus, folder, 2, *SHARDED, *EVERY_LAYER)
    return folder


@pytest.mark.slow
def test_two_processes_equal_one_and_each_resumes_the_other(corpus: Corpus, sharded: Path, tmp_path: Path) -> None:
    whole = train(corpus, tmp_path / "whole", 1, "--update-freq", "2")
    assert_same(saved(sharded), whole)
    assert_same(train(corpus, tmp_path / "two", 2, *SHARDED, start=tmp_path / "whole"), whole)
    assert_same(train(corpus, tmp_path / "one", 1, "--update-freq", "2", start=sharded), whole)


@pytest.mark.slow
def test_three_processes_resume_as_without_shards(corpus: Corpus, sharded: Path, tmp_path: Path) -> None:
    """Rows of 32 and 48 are no multiples of three, nor is an epoch's number of batches; they are accumulated."""
    three = [
        train(corpus, tmp_path / name, 3, "--update-freq", "2", *flags, start=sharded)
        for name, flags in (("ddp", ()), ("sharded", (*SHARDED, "--checkpoint-activations")))
    ]
    assert_same(*three)


@pytest.mark.slow
@pytest.mark.parametrize("how", [("--bf16",), ("--memory-efficient-bf16", "--optimizer", "adam")])
def test_half_precision_resumes(corpus: Corpus, tmp_path: Path, how: tuple[str, ...]) -> None:
    train(corpus, tmp_path / "sharded", 2, *SHARDED, *how)
    resumed = train(corpus, tmp_path / "two", 2, *SHARDED, *how, start=tmp_path / "sharded")
    found, expected = resumed["model"], saved(tmp_path / "sharded")["model"]
    lost = 0.01 if how == ("--bf16",) else 0  # fairseq saves no fp32 copy of its parameters
    torch.testing.assert_close(found, expected, atol=lost, rtol=0)


@pytest.mark.slow
def test_translations_are_scored_in_training(corpus: Corpus, tmp_path: Path) -> None:
    """Searches of the two processes have different lengths; what is saved afterwards is whole."""
    flags = [one for one in STILL if one != "--disable-validation"]
    flags += ["--eval-bleu", "--eval-bleu-args", '{"max_len_a": 1, "max_len_b": 2}', *EVERY_LAYER]
    flags += ["--validate-interval-updates", "2", "--batch-size-valid", "16"]  # a batch of short sources, one of long
    arguments = cli.train_arguments(corpus, tmp_path / "two", *flags, *SHARDED)
    said = cli.forked_training(arguments, 2, tmp_path / "log")
    assert said.count("| bleu ") >= 2
    path = tmp_path / "two" / "checkpoint_best.pt"
    assert len(cli.in_order(cli.call("generate", *cli.generate_arguments(corpus, path)))) == cli.TEST_SENTENCES


@pytest.mark.slow
def test_gradients_that_are_not_finite_leave_a_crash_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    arguments = cli.train_arguments(corpus, tmp_path / "two", *STILL, *SHARDED, "--lr", "1e38")
    with pytest.raises(cli.CommandError, match="FloatingPointError"):
        cli.forked_training(arguments, 2, tmp_path / "log")
    assert (tmp_path / "two" / "crash.pt").is_file()


FLAGS = """--store-ema --use-bmuf --amp --quantization-config-path pq.yaml --model-parallel-size 2 --use-sharded-state
    --heartbeat-timeout 60 --cpu-offload --pipeline-model-parallel --zero-sharding os --encoder-layerdrop 0.5
    --decoder-layerdrop 0.5 --adaptive-input --base-layers 1 --quant-noise-pq 0.1 --criterion adaptive_loss
    --task online_backtranslation --mono-langs a,b --valid-lang-pairs a-b --fp16"""
OVERRIDES = """ema.store_ema=True optimization.use_bmuf=True common.amp=True common.quantization_config_path=pq.yaml
    common.model_parallel_size=2 distributed_training.use_sharded_state=True distributed_training.heartbeat_timeout=60
    distributed_training.cpu_offload=True distributed_training.pipeline_model_parallel=True
    distributed_training.zero_sharding=os +model._name=relpos_transformer +model.encoder_layerdrop=0.5
    +model.decoder_layerdrop=0.5 +model.adaptive_input=True +model.base_layers=1 +model.quant_noise_pq=0.1
    criterion=adaptive_loss +task._name=online_backtranslation common.fp16=True"""


def of_flags(backend: str, processes: int, flags: str = FLAGS) -> DictConfig:
    """Return what fairseq-train makes of flags."""
    arch = "" if "--arch" in flags else "--arch relpos_transformer"
    line = f"data {arch} {flags} --ddp-backend {backend} --distributed-world-size {processes}"
    given = options.parse_args_and_arch(options.get_training_parser(), line.split())
    return convert_namespace_to_omegaconf(given)


def of_overrides(backend: str, processes: int) -> DictConfig:
    """Return what fairseq-hydra-train makes of OVERRIDES."""
    place = "distributed_training"
    more = (f"{place}.ddp_backend={backend}", f"{place}.distributed_world_size={processes}")
    cfg = recipes.composed(Path(config.__file__).parent, "config", *OVERRIDES.split(), *more)
    add_defaults(cfg)
    return cfg


@pytest.mark.parametrize("made", [of_flags, of_overrides])
def test_what_cannot_be_sharded_is_refused(made: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option is named as it is typed."""
    cfg, named = made(sharding.BACKEND, 2), r"(--.*) \(hydra: (.*)\) does not work with --ddp-backend fully_sharded"
    for row in [[row] for row in sharding.REFUSED if "_reg_" not in row[0]] + [[]]:
        monkeypatch.setattr(sharding, "REFUSED", row)
        with pytest.raises(UserError, match=named) as refused:
            sharding.refuse_unshardable(cfg)
        flag, override = re.match(named, str(refused.value)).groups()
        assert flag in " ".join(FLAGS.split())
        assert override in OVERRIDES or override.replace("=", "._name=") in OVERRIDES
    assert flag == "--fp16"


@pytest.mark.parametrize("flag", ["--mha-reg-scale-factor 0.5", "--ffn-reg-scale-factor 0.5"])
def test_losses_of_whole_parameters_are_refused(flag: str) -> None:
    cfg = of_flags(sharding.BACKEND, 2, f"--arch relpos_roberta --task masked_lm --bf16 {flag}")
    with pytest.raises(UserError, match=f"^{flag} .*: give 0: its loss is of whole parameters"):
        sharding.refuse_unshardable(cfg)


@pytest.mark.parametrize(
    "given",
    [("pytorch_ddp", 2, FLAGS), (sharding.BACKEND, 1, FLAGS), (sharding.BACKEND, 2, "--task translation --bf16")],
)
def test_other_trainings_are_not_refused(given: tuple[str, int, str]) -> None:
    sharding.refuse_unshardable(of_flags(*given))


def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    adagrad = SimpleNamespace(supports_flat_params=False)
    with pytest.raises(UserError, match="--optimizer adagrad does not work with .*: give adam or relpos_adam"):
        sharding.check_optimizer(adagrad, "adagrad")


def test_each_optimizer_of_a_composite_one_reads_whole_states() -> None:
    inner = [torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2)]
    parts = {str(number): SimpleNamespace(optimizer=part) for number, part in enumerate(inner)}
    composite = SimpleNamespace(optimizer=SimpleNamespace(optimizers=parts), supports_flat_params=True)
    sharding.check_optimizer(composite, "composite")
    assert all(part._optimizer_load_state_dict_pre_hooks for part in inner)


def gradients(made: Callable, scheme: str, rank: int | None) -> dict[str, torch.Tensor | None]:
    """Return the gradients of a model that reads a batch of two, or one of two processes' that read a row each."""
    model, given, _ = made(scheme, min_params_to_wrap=0)
    randomized(model)
    if rank is not None:
        args = SimpleNamespace(ddp_backend=sharding.BACKEND, fp32_reduce_scatter=False, no_reshard_after_forward=False)
        sharding.shard(None, args, model, torch.distributed.group.WORLD, torch.device("cpu"))
    rows = slice(2) if rank is None else slice(rank, rank + 1)
    given = {name: tokens if tokens is None else tokens[rows] for name, tokens in given.items()}
    loss = model(**given)[0].square().sum()
    (loss / 2 if rank is None else loss).backward()  # shards get the mean of processes
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare_schemes(rank: int, place: dict[str, str]) -> None:
    """Compare the gradients of every scheme in one of two processes."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{place['MASTER_PORT']}", rank=rank, world_size=2
    )
    others = [(translation, "deberta_released"), (without_memory, "m4"), (roberta, "deberta")]  # layers share a table
    for made, scheme in [*((of_one_layer, scheme) for scheme in scheme_names()), *others]:
        whole, sharded = gradients(made, scheme, None), gradients(made, scheme, rank)
        assert whole.keys() == sharded.keys()
        for name, found in sharded.items():
            assert (whole[name] is None) == (found is None), (scheme, name)
            if found is not None:
                assert isinstance(found, DTensor), (scheme, name)
                rows = sharding._cut(whole[name], found).to_local()
                close = torch.allclose(found.to_local(), rows, atol=1e-4, rtol=1e-4)
                assert close, (scheme, name, found.to_local() - rows)
    torch.distributed.destroy_process_group()


def of_one_layer(scheme: str, **values: Any) -> Made:
    """Return a model whose sides have a layer each, and a batch."""
    return translation(scheme, encoder_layers=1, decoder_layers=1, **values)


def without_memory(scheme: str, **values: Any) -> Made:
    """Return a model with memory, and a first segment."""
    return small_xl(position_scheme=scheme, **values), {"src_tokens": stream()}, None


def test_every_scheme_has_the_gradients_of_one_process() -> None:
    start_processes(compare_schemes, (cli.places_of(2)[0],), nprocs=2, start_method="fork")
