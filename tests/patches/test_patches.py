"""Patches of fairseq that no command of the other tests shows: what happens with and without."""

from __future__ import annotations

import logging
import os
import shutil
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import TokenBlockDataset, data_utils, encoders, indexed_dataset
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed
from fairseq.file_io import PathManager
from fairseq.modules import AdaptiveSoftmax
from fairseq.modules.layer_norm import Fp32LayerNorm
from fairseq.modules.quantization.scalar import ops
from fairseq.tasks import masked_lm
from omegaconf import DictConfig, OmegaConf
from torch import nn

import relpos_fairseq  # noqa: F401
from helpers import commands as cli
from helpers.commands import relpos
from helpers.roberta import small_roberta
from relpos_fairseq.core.scheme import PositionScheme
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.nn.packed import BFloat16Linear
from relpos_fairseq.patches import training
from relpos_fairseq.patches.checkpoints import allow_checkpoint_types, load_or_explain, restore
from relpos_fairseq.text.assets import read_text


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 37, 100])
@pytest.mark.parametrize("limit", [{"max_sentences": 16}, {"max_tokens": 50}, {"max_sentences": 1}])
@pytest.mark.parametrize("vector", [True, False])
def test_the_last_batch_is_kept(count: int, limit: dict[str, int], vector: bool) -> None:
    """No sample is lost for not filling a batch of the required multiple, and no batch is above its limit."""
    sizes = np.random.default_rng(count).integers(1, 20, count)
    order = np.argsort(sizes, kind="stable")
    how = {"num_tokens_fn": lambda index: sizes[index], "required_batch_size_multiple": 8, **limit}
    batches = data_utils.batch_by_size(order, num_tokens_vec=sizes[order] if vector else None, **how)
    assert sorted(int(one) for batch in batches for one in batch) == [*range(count)]
    for batch in batches:
        assert len(batch) <= limit.get("max_sentences", count)
        assert len(batch) * max(sizes[one] for one in batch) <= limit.get("max_tokens", 10**9)
    if count % 8 > 1 and limit != {"max_sentences": 1}:
        assert sum(map(len, data_utils.batch_by_size.__wrapped__(order, **how))) < count


def test_a_sentence_that_is_not_fetched_ahead_is_read(tmp_path: Path) -> None:
    """--dataset-impl cached: a trainer keeps the first batch before any is fetched."""
    lines = [torch.tensor([4, 5, 2]), torch.tensor([6, 2])]
    builder = indexed_dataset.make_builder(str(tmp_path / "text.bin"), "cached")
    for line in lines:
        builder.add_item(line)
    builder.finalize(str(tmp_path / "text.idx"))
    dataset = indexed_dataset.make_dataset(str(tmp_path / "text"), "cached", fix_lua_indexing=True)
    with pytest.raises(KeyError):
        type(dataset).__getitem__.__wrapped__(dataset, 1)
    assert dataset[1].tolist() == [6, 2]
    dataset.prefetch([0])
    assert [dataset[n].tolist() for n in (0, 1)] == [line.tolist() for line in lines]


def test_a_sample_above_max_tokens() -> None:
    """It is named, and the flag, where fairseq asserts."""
    with pytest.raises(ValueError, match="sample #2 has 4 tokens, and a batch --max-tokens 3: raise it"):
        data_utils.batch_by_size(np.arange(3), lambda number: number + 2, max_tokens=3)
    with pytest.raises(AssertionError):
        data_utils.batch_by_size.__wrapped__(np.arange(3), lambda _: 3, max_tokens=2)


def test_scalar_noise_on_a_cpu() -> None:
    """The scale is of the weight's own range, and a weight moves by no more than half a step of it."""
    weight = torch.linspace(-1, 1, 512)
    rounded, scale, zero = ops.emulate_int(weight, bits=8, method="histogram")
    assert (rounded - weight).abs().max() <= scale.item() and 0 < scale.item() < 2.1 / 255
    torch.testing.assert_close(ops.emulate_int(weight, 8, "histogram", scale, zero)[0], rounded)


def test_sentences_are_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--sample-break-mode eos` reads a name that numpy 2 removed."""
    lines = [torch.tensor([4, 5, 2]), torch.tensor([6, 2])]
    arguments = (lines, [3, 2], None, 1, 2, "eos")
    assert [len(block) for block in TokenBlockDataset(*arguments)] == [3, 2]
    if not hasattr(np, "long"):  # numpy 1 has the name itself
        return
    monkeypatch.delattr(np, "compat")
    with pytest.raises(AttributeError, match="compat"):
        TokenBlockDataset(*arguments)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["eos", "complete", "complete_doc", "none"])
@pytest.mark.parametrize("longest", [65_535, 65_536, 65_537, 66_000, 131_072])
def test_long_lines_have_their_length(longest: int, mode: str) -> None:
    """Fairseq counts in 16 bits without a sign: a line of 65,536 tokens has none there, an empty one ends before 0."""
    sizes = [3, longest, 1, 0, 2]  # a line of one token ends a document
    lines = [torch.full((size,), 4) for size in sizes]
    blocks = TokenBlockDataset(lines, sizes, 7, 1, 2, mode, include_targets=True)
    assert blocks.sizes.tolist() == [len(target) for _, target, _ in blocks]
    assert all(len(source) == max(len(target), 1) for source, target, _ in blocks)
    assert sum(blocks.sizes) == sum(sizes) - (mode == "complete_doc")
    assert mode == "none" or max(blocks.sizes) == longest


@pytest.mark.filterwarnings("error")
def test_more_lines_than_tokens_keep_their_numbers() -> None:
    """Fairseq counts lines in the type of the number of tokens."""
    sizes = np.zeros(70_000, dtype=np.int64)
    sizes[-1] = 2
    lines = [torch.full((size,), 4) for size in sizes]
    assert TokenBlockDataset(lines, sizes, None, 1, 2, "eos")[len(sizes) - 1].tolist() == [4, 4]
    assert TokenBlockDataset(lines, sizes, 7, 1, 2, "none")[0].tolist() == [4, 4]


def test_swish_is_a_function() -> None:
    """Without the patch a layer of fairseq's gets a module where it wants its input's image."""
    x = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(utils.get_activation_fn("swish")(x), x * x.sigmoid())
    assert not isinstance(utils.get_activation_fn.__wrapped__("swish")(x), torch.Tensor)


def test_checkpoints_load_safely(tmp_path) -> None:
    """What fairseq saves beside tensors: options, meters' numbers, a state over several ranks."""
    path = tmp_path / "checkpoint.pt"
    saved = {
        "args": Namespace(arch="roberta"),
        "cfg": OmegaConf.create({"lr": [0.1], "name": "x"}),
        "meters": [np.float64(3.5), np.arange(3), np.float32(1)],
        "task_state": {"ranks": [distributed._TensorPlaceholder(0)], "read": defaultdict(list)},
    }
    torch.save(saved, path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["args"] == saved["args"] and loaded["cfg"] == saved["cfg"]
    assert float(loaded["meters"][0]) == 3.5 and loaded["meters"][1].tolist() == [0, 1, 2]
    assert loaded["task_state"]["ranks"][0].index == 0
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(Exception, match="weights_only"):
            torch.load(path, weights_only=True)
    finally:
        allow_checkpoint_types()


def test_a_task_with_its_own_bpe_asks_it() -> None:
    """Only the task that has lost its options asks the data which symbols begin a word."""
    with pytest.raises(Exception, match="no_such_bpe"):
        masked_lm.get_whole_word_mask(Namespace(bpe="no_such_bpe"), None)


def test_overrides_of_later_options(caplog) -> None:
    """A checkpoint of ours that lacks an option takes it; what no option is stays out."""
    overrides = {"position_rope_scaling": "yarn", "decoder_layers": 3, "data": "d", "bpe_codes": 1}
    for name in ("relpos_transformer_lm_tiny", "transformer_lm"):
        model = {"_name": name, "decoder_layers": 2}
        config = OmegaConf.create({"model": model, "task": {"data": "c"}, "bpe": None})
        checkpoint_utils.overwrite_args_by_name(config, overrides)
        later = {"position_rope_scaling": "yarn"} if "relpos" in name else {}
        assert config.model == {**model, "decoder_layers": 3, **later}
        assert config.task == {"data": "d"}
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "decoder_layers 3 in place of the checkpoint's 2",
        "the checkpoint is older than position_rope_scaling: set to 'yarn'",
    ]


def test_a_killed_copy_leaves_what_was_there(tmp_path, monkeypatch):
    """checkpoint_last.pt is a copy: half of one would be no checkpoint at all."""
    old, new = tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_1_2.pt"
    old.write_bytes(b"old")
    new.write_bytes(b"newer")

    def killed(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            PathManager.copy(str(new), str(old), overwrite=True)
    assert old.read_bytes() == b"old"
    assert PathManager.copy(str(new), str(old), overwrite=True)
    assert old.read_bytes() == b"newer" and len(list(tmp_path.iterdir())) == 2


@pytest.fixture(params=["no GPU", "--cpu beside a GPU"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """Of a command that computes on CPUs."""
    found = OmegaConf.structured(FairseqConfig())
    found.common.cpu = request.param != "no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param != "no GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(request.param != "no GPU"))
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process that meets no other; the backends that fairseq asks for."""
    asked = []

    def join(cfg: FairseqConfig) -> int:
        asked.append(cfg.distributed_training.distributed_backend)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        return cfg.distributed_training.distributed_rank

    monkeypatch.setattr(distributed, "distributed_init", join)
    monkeypatch.setattr(distributed, "get_global_group", lambda: None)
    return asked


def call(config: DictConfig) -> list[int]:
    """The ranks that this process trained as."""
    trained = []
    distributed.call_main(config, lambda cfg: trained.append(cfg.distributed_training.distributed_rank))
    return trained


@pytest.mark.parametrize(
    ("load", "threads", "policy", "told"), [(0.2, 2, "", 0), (1.1, 2, "", 1), (1.1, 1, "", 0), (9, 2, "PASSIVE", 0)]
)
def test_waiting_threads_are_told_of_where_cores_are_short(
    config, alone, monkeypatch, caplog, load, threads, policy, told
):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    with caplog.at_level("INFO"):
        call(config)
    assert sum("OMP_WAIT_POLICY=passive" in line for line in caplog.messages) == told


@pytest.mark.parametrize("context", [7, 8, 9])
def test_context_leaves_tokens_to_score(config, alone, context: int) -> None:
    """Without the patch, fairseq would divide by zero where the context fills the block."""
    config.task, config.eval_lm.context_window = {"tokens_per_sample": 8}, context
    if context < 8:
        assert call(config) == [0]
        return
    with pytest.raises(ValueError, match=f"--context-window {context} .*--tokens-per-sample 8"):
        call(config)


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_processes_on_cpus_take_gloo(config, alone, monkeypatch, backend: str) -> None:
    """Those of torchrun, and not nccl, fairseq's default; what was chosen stays."""
    assert config.distributed_training.distributed_backend == "nccl"
    config.distributed_training.distributed_backend = backend
    for name, value in cli.places_of(2)[1].items():
        monkeypatch.setenv(name, value)
    assert call(config) == [1]
    assert alone == [{"nccl": "gloo"}.get(backend, backend)]


@pytest.fixture
def gpu(config: DictConfig) -> DictConfig:
    """The same of a command that computes on the GPU."""
    if not config.common.cpu:
        pytest.skip("there is none")
    config.common.cpu = False
    yield config
    torch.distributed.destroy_process_group()


def test_a_gpu_keeps_nccl(gpu, alone, monkeypatch) -> None:
    gpu.distributed_training.distributed_init_method = "tcp://localhost:29500"
    gpu.distributed_training.distributed_no_spawn = True
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    call(gpu)
    assert alone == ["nccl"]


def test_nodes_of_one_gpu_meet(gpu, alone, monkeypatch) -> None:
    """Torchrun's processes, for which fairseq looks only where a node has two GPUs."""
    for name, value in cli.places_of(2)[1].items():
        monkeypatch.setenv(name, value)
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    assert call(gpu) == [1] and alone == ["nccl"] and devices == [0]


def test_processes_on_cpus_train(config, alone) -> None:
    """One that is told where to meet others is the process of its rank, without a flag more."""
    config.distributed_training.distributed_init_method = "tcp://localhost:29500"
    config.distributed_training.distributed_world_size = 2
    config.distributed_training.distributed_rank = 1
    assert call(config) == [1] and alone == ["gloo"]


@pytest.mark.parametrize("several", [False, True])
def test_adaptive_loss_on_one_process(alone, several: bool) -> None:
    """It refuses the default of --ddp-backend, which one process does not use."""
    config = SimpleNamespace(ddp_backend="pytorch_ddp", sentence_avg=True)
    task = SimpleNamespace(target_dictionary=None)
    if not several:
        assert AdaptiveLoss.build_criterion(config, task).sentence_avg
        return
    distributed.distributed_init(FairseqConfig())
    try:
        with pytest.raises(Exception, match="legacy_ddp"):
            AdaptiveLoss.build_criterion(config, task)
    finally:
        torch.distributed.destroy_process_group()


def test_adaptive_loss_needs_a_cutoff() -> None:
    """A model without an adaptive softmax is told what it lacks."""
    criterion = AdaptiveLoss(SimpleNamespace(target_dictionary=None), sentence_avg=True)
    for model in (SimpleNamespace(decoder=SimpleNamespace(adaptive_softmax=None)), SimpleNamespace()):
        with pytest.raises(ValueError, match="adaptive_loss needs a model with --adaptive-softmax-cutoff"):
            criterion(model, {})


@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adaptive_loss_scores_every_word(sentence_avg: bool, dtype: torch.dtype) -> None:
    """The loss is that of the model's own probabilities; the word that is 1 in its band is no padding, padding is.

    In bf16 it is summed in fp32, as fairseq's other criterions sum theirs.
    """
    torch.manual_seed(1)
    softmax = AdaptiveSoftmax(12, 8, [4, 8], dropout=0.0).eval().to(dtype)
    criterion = AdaptiveLoss(SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: 1)), sentence_avg)
    features, targets = torch.randn(2, 6, 8), torch.tensor([[2, 5, 9, 4, 11, 3], [9, 5, 2, 1, 1, 1]])

    class Model:
        decoder = SimpleNamespace(adaptive_softmax=softmax)
        get_targets = staticmethod(lambda sample, output: sample["target"])

        def __call__(self) -> tuple:
            return (features.to(dtype),)

    loss, size, counted = criterion(Model(), {"net_input": {}, "target": targets})
    scores = softmax.float().get_log_prob(features.to(dtype).float(), None).gather(2, targets.unsqueeze(2)).squeeze(2)
    right = -scores[targets != 1].sum()
    assert loss.shape == (1,) and loss.dtype is torch.float32
    assert torch.allclose(loss, right, rtol=1e-5 if dtype is torch.float32 else 2e-3)
    assert (size, counted["ntokens"], counted["nsentences"]) == (2 if sentence_avg else 9, 9, 2)
    assert counted["loss"] == loss and counted["sample_size"] == size


@pytest.mark.parametrize("suffix", ["", "-shard0"])
def test_a_checkpoint_to_restore_is_there(tmp_path, suffix: str) -> None:
    """Training from scratch is nothing that a wrong name may do; the default name may be of a first start."""
    trainer = SimpleNamespace(checkpoint_suffix=suffix)
    absent = SimpleNamespace(restore_file=str(tmp_path / "model.pt"))
    with pytest.raises(ValueError, match=r"--restore-file .*model\.pt does not exist"):
        checkpoint_utils.load_checkpoint(absent, trainer)
    (tmp_path / f"model{suffix}.pt").touch()
    for name in ("checkpoint_last.pt", str(tmp_path / "new" / "checkpoint_last.pt"), absent.restore_file):
        _, cfg = restore(lambda cfg, trainer: (None, cfg), SimpleNamespace(restore_file=name), trainer)
        assert cfg.restore_file == name


def test_another_dictionary_is_named() -> None:
    """The trainer hides the sizes under a sentence about architectures."""

    def load(self, filename: str, reset_optimizer: bool) -> None:
        one, other = torch.nn.Module(), torch.nn.Module()
        for module, rows in ((one, 9), (other, 12)):
            module.encoder = torch.nn.Module()
            module.encoder.embed_tokens = torch.nn.Embedding(rows, 4)
        try:
            other.load_state_dict(one.state_dict())
        except Exception:
            raise Exception("Cannot load model parameters from checkpoint; ensure that the architectures match.")  # noqa: B904

    said = r"a\.pt has 9 rows in encoder\.embed_tokens\.weight, and the dictionary of the data 12: binarise the data"
    with pytest.raises(ValueError, match=said):
        load_or_explain(load, [], None, "a.pt", False)


def test_a_process_leaves_its_group(config: DictConfig, alone: list[str]) -> None:
    """Gloo's threads that outlive Python's can abort a training that has ended well."""
    trained = []
    distributed.distributed_main(0, trained.append, config, {})
    assert len(trained) == 1
    assert not torch.distributed.is_initialized()


def test_damaged_data_are_not_read(tmp_path, capsys):
    """Size and time tell a change cheaply; the hash tells it where both were kept, if it is asked for."""
    text = tmp_path / "t.txt"
    text.write_text("".join(f"the cat sat on the mat {n}\n" for n in range(400)))
    out = tmp_path / "lm"
    assert relpos("prepare", "lm", "--text", text, "--shares", "0.8,0.1,0.1", "--level", "char", "--out", out) == 0
    valid, old = out / "valid.bin", (out / "valid.bin").stat()
    whole = valid.read_bytes()
    load = lambda: data_utils.load_indexed_dataset(str(out / "valid"))  # noqa: E731
    load(), read_text(out)
    assert relpos("doctor", "--verify", out) == 0
    valid.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    with pytest.raises(UserError, match="valid.bin is not the file that .*manifest.json describes"):
        load()
    os.utime(valid, ns=(old.st_atime_ns, old.st_mtime_ns))
    load()  # nothing tells, unless every byte is read
    assert relpos("doctor", "--verify", out) == 2 and "valid.bin is not the file" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert relpos("doctor", "--verify", tmp_path / "none") == 2 and "holds no file" in capsys.readouterr().err
    valid.write_bytes(whole[:-2])
    os.utime(valid, ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(UserError, match="valid.bin is not"):
        load()
    valid.write_bytes(whole)
    load()  # restored, though younger
    (out / "dict.txt").write_text("<html>\n")
    with pytest.raises(UserError, match="dict.txt is not"):
        read_text(out)


@pytest.mark.parametrize("content", [b"", b"a b c\n", b"#version: 0.2\na\n", b"#version: x.y\na b\n", b"\xff\xfe"])
def test_subwords_of_a_broken_file_name_it(tmp_path, content):
    path = tmp_path / "broken"
    path.write_bytes(content)
    subwords = {"subword_nmt": ["bpe_codes"], "sentencepiece": ["sentencepiece_model"]}
    for name, options in (subwords | {"gpt2": ["gpt2_encoder_json", "gpt2_vocab_bpe"]}).items():
        given = dict.fromkeys(options, str(path))
        with pytest.raises(ValueError, match="broken is not ") as caught:
            encoders.build_bpe(Namespace(bpe=name, bpe_separator="@@", **given))
        assert "\n" not in str(caught.value)


def test_merges_with_a_byte_order_mark_are_the_same(tmp_path):
    for name, mark in (("a", b""), ("b", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(mark + b"#version: 0.2\na b</w>\n")
        made = encoders.build_bpe(Namespace(bpe="subword_nmt", bpe_codes=str(tmp_path / name), bpe_separator="@@"))
        assert made.encode("ab aab") == "ab a@@ ab"


FAST = SimpleNamespace(lr=[1e-3])


@pytest.mark.parametrize(
    ("scheme", "lr", "scale", "value", "said"),
    [
        ("learned+m4", 3e-5, 1, 0.0, "m4"),
        ("t5+rel_scalar", 1e-4, 1, 0.0, "rel_scalar, t5"),
        ("learned+m4", 3e-5, 20, 0.0, None),
        ("learned+t5", 3e-5, 20, 0.0, "t5"),  # a scalar is one number where a vector has eight
        ("t5+m4", 3e-5, 20, 0.0, "t5"),
        ("t5 gain 50", 3e-5, 20, 0.0, None),
        ("learned+m4", 1e-3, 1, 0.0, None),
        ("t5", 5e-4, 1, 0.0, None),  # no fine-tuning's rate
        ("learned+m4", 3e-5, 1, 0.01, None),  # trained before
        ("learned+m4", 3e-5, 1, None, None),  # not trained now
        ("learned", 3e-5, 1, 0.0, None),
        ("alibi", 3e-5, 1, 0.0, None),
    ],
)
def test_fine_tuning_that_leaves_tables_neutral_is_told(scheme, lr, scale, value, said, caplog):
    """Tables that a pre-trained model was given stay where they begin, and nothing else would say so."""
    start = {} if scheme in ("learned", "alibi") else {"position_init": "neutral"}
    name, _, gain = scheme.partition(" gain ")
    model = small_roberta(position_scheme=name, **start, position_scalar_gain=float(gain) if gain else None)
    for part in (part for one in model.modules() if isinstance(one, PositionScheme) for part in one.parameters()):
        part.requires_grad_(value is not None).data += value or 0.0
    cfg = SimpleNamespace(
        common=SimpleNamespace(fp16=False, bf16=False, tpu=False),
        model=SimpleNamespace(_name="relpos_roberta"),
        optimizer=SimpleNamespace(_name="relpos_adam", position_lr_scale=scale),
        optimization=SimpleNamespace(lr=[lr / 2, lr]),
    )
    trainer = SimpleNamespace(cfg=cfg, _optimizer=None, cuda=False, is_data_parallel_master=True, model=model)
    training.build_optimizer(lambda self: self, trainer)
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert told == [] if said is None else told[0].startswith(f"positions {said} are neutral")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, True),
        ({"bf16": True}, False),
        ({"cuda": True}, False),
        ({"_name": "transformer"}, False),
        ({"no": "x"}, False),
    ],
)
def test_who_would_train_sooner_in_bf16_is_told(changed, said, caplog, monkeypatch):
    """A model of ours in fp32 on a processor that multiplies bf16."""
    monkeypatch.setattr(BFloat16Linear, "problem", lambda: changed.get("no"))
    common = SimpleNamespace(fp16=False, bf16=changed.get("bf16", False), tpu=False)
    model = SimpleNamespace(_name=changed.get("_name", "relpos_roberta_base"))
    cfg = SimpleNamespace(common=common, model=model, optimizer=SimpleNamespace(_name="adam"), optimization=FAST)
    optimizer = SimpleNamespace(params=[])
    trainer = SimpleNamespace(
        cfg=cfg, _optimizer=optimizer, cuda=changed.get("cuda", False), is_data_parallel_master=True
    )
    trainer.model = nn.Sequential(nn.LayerNorm(4))
    with caplog.at_level(logging.INFO, training.__name__):
        assert training.build_optimizer(lambda self: self, trainer) is trainer
    assert (type(trainer.model[0]) is Fp32LayerNorm) == ("bf16" in changed)
    assert said == ("--bf16 would train about twice as fast" in caplog.text)
