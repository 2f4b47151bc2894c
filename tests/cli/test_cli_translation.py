"""The real fairseq commands on translation: train, translate, validate, resume, load."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks, utils
from fairseq.checkpoint_utils import load_ema_from_checkpoint, load_model_ensemble
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli.hydra_train import _hydra_main
from omegaconf import open_dict

import relpos_fairseq  # noqa: F401  registers the models, and lets torch.load read checkpoints
from cases import ENCODERS
from helpers import FULL, recipes
from helpers import commands as cli
from helpers.commands import SMALL, TEST_SENTENCES, USER_DIR, VALID_SENTENCES, Corpus
from relpos_fairseq.core.placement import PositionMismatchError
from relpos_fairseq.core.plan import decode_text
from relpos_fairseq.evaluation.averaging import write_average
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.models.relpos_transformer import SIZES as named
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel

M4 = ("--position-scheme", "m4")
UPDATES = ("--max-update", "2", "--disable-validation")
# width, ffn, heads, layers, dropout: the sizes of the published models.
SIZES = {
    "relpos_transformer": (512, 2048, 8, 6, 0.1),
    "relpos_transformer_tiny": (128, 512, 4, 2, 0.1),
    "relpos_transformer_iwslt_de_en": (512, 1024, 4, 6, 0.1),
    "relpos_transformer_wmt_en_de": (512, 2048, 8, 6, 0.1),
    "relpos_transformer_wmt_en_de_big": (1024, 4096, 16, 6, 0.3),
}
RECIPES = {
    "tiny": (128, 512, 4, 2, 0.0),
    "multi30k": (256, 512, 4, 3, 0.3),
    "iwslt_de_en": (512, 1024, 4, 6, 0.3),
    "wmt_en_de": (512, 2048, 8, 6, 0.1),
    "wmt_en_de_big": (1024, 4096, 16, 6, 0.3),
    "wmt14_shaw": (512, 1024, 8, 6, 0.1),
    "wmt14_shaw_big": (1024, 4096, 16, 6, 0.3),
}


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> Path:
    """The last checkpoint of an m4 model, trained by the real command."""
    save_dir = tmp_path_factory.mktemp("trained")
    arguments = cli.train_arguments(corpus, save_dir, *M4, "--max-update", "60")
    (save_dir / "log").write_text(cli.command("fairseq-train", *arguments))
    return save_dir / "checkpoint_last.pt"


def scheme_in(checkpoint: Path, side: str = "encoder") -> str:
    """What the checkpoint remembers of its positions."""
    return decode_text(cli.load(checkpoint)["model"][f"{side}.positions.scheme_version"])


def shape_of(model) -> tuple:
    """(width, ffn, heads, layers, dropout) of a model whose two sides agree."""
    shapes = set()
    for side in (model.encoder, model.decoder):
        layer, width = side.layers[0], side.embed_tokens.embedding_dim
        assert layer.self_attn.q_proj.out_features == width
        size = (width, layer.fc1.out_features, layer.self_attn.num_heads)
        shapes.add((*size, len(side.layers), layer.dropout_module.p))
    [shape] = shapes
    return shape


# Train, then every tool that reads a checkpoint; none is told the scheme.


@pytest.mark.slow
def test_training_learns(trained):
    log = (trained.parent / "log").read_text()
    valid = cli.losses(log, "valid")
    assert len(valid) >= 5 and valid[-1] < valid[0] - 0.3
    assert "positions of encoder: m4 " in log and "positions of decoder: m4 " in log
    assert scheme_in(trained).startswith("m4 ")
    assert "Warning" not in log
    model = cli.load(trained)["cfg"]["model"]  # by torch's weights_only
    assert (model["position_scheme"], model["_name"]) == ("m4", "relpos_transformer_tiny")


HUB = """
import json, sys
from pathlib import Path
from fairseq.models.transformer import TransformerModel
folder, file, data, user_dir, sources = sys.argv[1:]
hub = TransformerModel.from_pretrained(folder, file, data, user_dir=user_dir)
print('FOUND' + json.dumps(hub.translate(Path(sources).read_text().splitlines(), beam=2, max_len_b=14)))
"""


@pytest.mark.slow
def test_as_many_sentences_come_out_as_go_in_by_every_tool(corpus, trained, tmp_path):
    generated = cli.in_order(cli.generate(corpus, trained))
    assert len(generated) == TEST_SENTENCES
    assert len(set(generated)) > 5  # the model says something of each sentence

    source = corpus.raw / "test.src"
    lines = [*"--beam 2 --buffer-size 37 --batch-size 10".split(), *cli.LENGTHS, "--input", source]
    interactive = cli.in_order(cli.evaluate("interactive", corpus.binary, trained, *lines))
    script = tmp_path / "hub.py"
    script.write_text(HUB)
    output = cli.command("python", script, trained.parent, trained.name, corpus.binary, USER_DIR, source)
    translated = json.loads(re.search(r"^FOUND(.*)$", output, re.MULTILINE)[1])
    assert len(interactive) == len(translated) == TEST_SENTENCES
    # One beam may end in a tie that rounding decides.
    assert sum(a != b for a, b in zip(generated, interactive, strict=True)) <= 1
    assert sum(a != b for a, b in zip(generated, translated, strict=True)) <= 1


@pytest.mark.slow
def test_generate_does_not_depend_on_the_batch(corpus, trained):
    by_tokens = cli.generate(corpus, trained)
    one_by_one = cli.generate(corpus, trained, "--batch-size", "1")
    texts = [cli.in_order(output) for output in (by_tokens, one_by_one)]
    assert len(texts[0]) == len(texts[1]) == TEST_SENTENCES
    assert sum(a != b for a, b in zip(*texts, strict=True)) <= 1
    assert cli.scores(by_tokens) == pytest.approx(cli.scores(one_by_one), abs=1e-3)


@pytest.mark.slow
def test_validate_counts_every_sentence(corpus, trained):
    batches = (["--max-tokens", "4000"], ["--batch-size", "3"])
    outputs = [cli.evaluate("validate", corpus.binary, trained, *more) for more in batches]
    tokens = sum(len(line.split()) + 1 for line in corpus.lines("valid", "tgt"))
    for output in outputs:
        assert cli.value(output, "bsz") == VALID_SENTENCES
        assert cli.value(output, "wpb") == tokens
    expected = cli.losses((trained.parent / "log").read_text(), "valid")[-1]
    for output in outputs:
        assert cli.losses(output, "valid")[-1] == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
def test_hydra_trains_and_generate_needs_no_flag(corpus, tmp_path):
    config = "fairseq-hydra-train --config-dir examples/translation/config --config-name tiny"
    model = "model.position_scheme=tupe model._name=relpos_transformer_tiny optimization.max_update=3"
    data = "task.source_lang=src task.target_lang=tgt common.cpu=true dataset.num_workers=0"
    folders = (f"task.data={corpus.binary}", f"checkpoint.save_dir={tmp_path}")
    output = cli.command(*f"{config} {model} {data}".split(), *folders)
    checkpoint = tmp_path / "checkpoint_last.pt"
    assert "positions of encoder: tupe " in output
    assert scheme_in(checkpoint).startswith("tupe ")
    assert len(cli.in_order(cli.generate(corpus, checkpoint))) == TEST_SENTENCES


@pytest.mark.parametrize("more", [(), ("common.bf16=true",)])
def test_fairseqs_composite_optimizer_trains_and_resumes(corpus, tmp_path, more):
    """Its own torch optimizer has neither groups nor defaults."""
    adam = {"_name": "relpos_adam", "adam_betas": "(0.9, 0.98)", "lr": [0.01], "position_lr_scale": 20}
    group = {"optimizer": adam, "lr_scheduler": {"_name": "fixed", "lr": [0.01]}}
    how = ("dataset.num_workers=0", "dataset.disable_validation=true", "model.position_scheme=t5", *more)
    for updates in (1, 2):
        paths = (f"checkpoint.save_dir={tmp_path}", f"optimization.max_update={updates}")
        cfg = composed(corpus, "tiny", *how, *paths)
        with open_dict(cfg), cli.captured() as said:
            cfg.optimizer = {"_name": "composite", "groups": {"default": group}}
            cfg.lr_scheduler = {"_name": "pass_through"}
            _hydra_main(cfg)
    assert "num_updates: 2 >= max_update" in said.getvalue()


# One for each kind of parts that a checkpoint may have; what others compute is tested with their models.
KINDS = ("none", "sentence", "shaw", "m4", "m4m", "tupe", "rope", "transformer_xl", "log_cpb")


@pytest.mark.parametrize("scheme", ENCODERS if FULL else KINDS)
def test_every_scheme_trains_and_translates(corpus, briefly, scheme):
    checkpoint = briefly("--position-scheme", scheme)
    assert scheme_in(checkpoint).split()[0] == scheme_in(checkpoint, "decoder").split()[0] == scheme
    output = cli.generate(corpus, checkpoint)
    assert len(cli.in_order(output)) == TEST_SENTENCES
    assert all(-20 < score < 0 for score in cli.scores(output))


def test_hub_needs_no_user_dir_where_the_package_is_imported(corpus, briefly):
    path = briefly(*M4)
    hub = RelPosTransformerModel.from_pretrained(str(path.parent), path.name, str(corpus.binary))
    translated = hub.translate(corpus.lines("test", "src"), beam=2, max_len_b=14)
    assert translated == cli.in_order(cli.generate(corpus, path))


# Named sizes and recipes.


def on_meta(cfg):
    """The model that fairseq builds for a whole config, without memory for its weights."""
    task = tasks.setup_task(cfg.task)
    with torch.device("meta"):
        return task.build_model(cfg.model)


def parsed(corpus: Corpus, *arguments: str):
    """The config that fairseq-train makes of a command line."""
    whole = [str(corpus.binary), "--task", "translation", *arguments]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=whole)
    return convert_namespace_to_omegaconf(args)


def composed(corpus: Corpus, recipe: str, *overrides: str):
    """The config that fairseq-hydra-train makes of a recipe for the corpus."""
    languages = ["task.source_lang=src", "task.target_lang=tgt"]
    data = [f"task.data={corpus.binary}", "common.cpu=true", f"common.user_dir={USER_DIR}"]
    return recipes.composed(cli.CONFIGS, recipe, *data, *languages, *overrides)


def test_every_named_size_is_tested():
    assert set(named) == set(SIZES)
    assert {path.stem for path in cli.CONFIGS.glob("*.yaml")} == set(RECIPES)


def by_arch(corpus: Corpus, name: str):
    return parsed(corpus, "--arch", name, "--position-scheme", "none", "--share-all-embeddings")


def by_hydra(corpus: Corpus, name: str):
    cfg = composed(corpus, "tiny")
    cfg.model = {"_name": name, "position_scheme": "none", "share_all_embeddings": True}
    add_defaults(cfg)
    return cfg


@pytest.mark.parametrize("config", [by_arch, by_hydra])
@pytest.mark.parametrize("name", SIZES)
def test_named_size_reaches_the_model(corpus, name, config):
    assert shape_of(on_meta(config(corpus, name))) == SIZES[name]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_says_what_it_trains(corpus, recipe):
    own = (f"++model.position_{name}=auto" for name in ("clip_distance", "share", "init"))
    cfg = composed(corpus, recipe, "model.position_scheme=alibi", *own)
    add_defaults(cfg)
    model = on_meta(cfg)
    assert shape_of(model) == RECIPES[recipe]
    assert model.encoder.positions.plan.name == model.decoder.positions.plan.name == "alibi"


def test_hydra_length_limits_reach_the_tables(corpus, tmp_path):
    small = ["++model.encoder_layers=1", "++model.decoder_layers=1", "optimization.max_update=1"]
    limits = ["+task.max_source_positions=30", "+task.max_target_positions=40", "model.position_scheme=learned"]
    where = ["dataset.num_workers=0", f"checkpoint.save_dir={tmp_path}"]
    cfg = composed(corpus, "tiny", *small, *limits, *where)
    with cli.captured():
        _hydra_main(cfg)
    weights = cli.load(tmp_path / "checkpoint_last.pt")["model"]
    rows = {name: len(weight) for name, weight in weights.items() if "positions.shared" in name}
    assert sorted(rows.values()) == [30, 40]


def test_recipe_of_the_base_model_is_the_papers(corpus):
    cfg = composed(corpus, "wmt_en_de")
    add_defaults(cfg)
    assert cfg.optimizer.adam_betas == "(0.9, 0.98)"
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("inverse_sqrt", 4000)
    assert (cfg.optimization.max_update, list(cfg.optimization.lr)) == (100000, [0.0007])
    assert cfg.dataset.max_tokens * cfg.optimization.update_freq[0] == 32768
    assert cfg.criterion.label_smoothing == 0.1 and cfg.model.share_all_embeddings


def test_flags_override_the_named_size(corpus):
    widths = ("--encoder-embed-dim", "64", "--decoder-embed-dim", "64", "--decoder-layers", "3")
    small = ("--arch", "relpos_transformer_wmt_en_de_big", *widths, "--dropout", "0.25")
    model = on_meta(parsed(corpus, *small, "--position-scheme", "none"))
    layer = model.encoder.layers[0]
    assert (layer.embed_dim, layer.fc1.out_features, len(model.encoder.layers)) == (64, 4096, 6)
    assert (len(model.decoder.layers), layer.self_attn.num_heads, layer.dropout_module.p) == (3, 16, 0.25)
    assert model.decoder.output_projection.in_features == 64


def test_each_side_has_its_own_scheme(corpus, briefly):
    checkpoint = briefly(*("--encoder-position-scheme", "shaw", "--decoder-position-scheme", "rel_scalar"))
    assert scheme_in(checkpoint).startswith("shaw ")
    assert scheme_in(checkpoint, "decoder").startswith("rel_scalar ")
    names = {name for name in cli.load(checkpoint)["model"] if ".self_attn.position." in name}
    scalars = {name for name in names if name.endswith(".bias_table")}
    assert scalars == {name for name in names if name.startswith("decoder")} and len(scalars) == 2
    assert len(names) > len(scalars)
    assert len(cli.in_order(cli.generate(corpus, checkpoint))) == TEST_SENTENCES


# Resume.


RESUMED = {
    "tables": "--position-scheme tupe+m4 --position-scale 2",
    # Positions are drawn anew for each batch of an update.
    "drawn": "--position-scheme=rope/fox+t5 --position-random-range=99 --update-freq=2",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", RESUMED)
def test_resume_inside_epoch_1_is_exact(corpus, tmp_path, what):
    flags = (*RESUMED[what].split(), "--disable-validation")
    cli.train(corpus, tmp_path / "whole", *flags, "--max-update", "8")
    cli.train(corpus, tmp_path / "parts", *flags, "--max-update", "3")
    shutil.copy(tmp_path / "parts" / "checkpoint_last.pt", tmp_path / "at_3.pt")
    output = cli.train(corpus, tmp_path / "parts", *flags, "--max-update", "8")
    assert "(epoch 1 @ 3 updates)" in output
    cli.assert_same_state(*(tmp_path / part / "checkpoint_last.pt" for part in ("whole", "parts")))
    assert cli.load(tmp_path / "at_3.pt")["optimizer_history"][-1]["num_updates"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [("--max-epoch", "1"), ("--max-update", "12")])
def test_resume_later_is_exact_with_new_batches_an_epoch(corpus, tmp_path, stop):
    flags = (*M4, "--update-epoch-batch-itr", "True", "--disable-validation")
    cli.train(corpus, tmp_path / "whole", *flags, "--max-update", "14")
    cli.train(corpus, tmp_path / "parts", *flags, *stop)
    before = cli.load(tmp_path / "parts" / "checkpoint_last.pt")
    assert 8 < before["optimizer_history"][-1]["num_updates"] < 14
    cli.train(corpus, tmp_path / "parts", *flags, "--max-update", "14")
    cli.assert_same_state(*(tmp_path / part / "checkpoint_last.pt" for part in ("whole", "parts")))


# Checkpoints under other flags.


@pytest.mark.slow
def test_resume_under_another_scheme_fails_and_names_both(corpus, briefly, tmp_path):
    checkpoint = tmp_path / "checkpoint_last.pt"
    shutil.copy(briefly(*M4), checkpoint)
    before = checkpoint.read_bytes()
    flags = ("--position-scheme", "m4m", "--max-update", "4")
    arguments = cli.train_arguments(corpus, tmp_path, *flags)
    output = cli.command("fairseq-train", *arguments, fails=True)
    last = output.strip().splitlines()[-1]
    assert "[m4 m4." in last and "[m4m m4m." in last and str(checkpoint) in last and "Traceback" not in output
    assert checkpoint.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_last.pt"}


DEBERTA = ("--position-scheme", "deberta")
MISMATCHES = {
    "p2c_index": (DEBERTA, (*DEBERTA, "--position-p2c-index", "mirrored"), "mirrored"),
    "scale": (M4, (*M4, "--position-scale", "3"), "scale=3"),
    "clip_distance": (M4, (*M4, "--position-clip-distance", "4"), "clip_distance=4"),
    "share": (M4, (*M4, "--position-share", "none"), "share=none"),
    "other_tensors": (M4, ("--position-scheme", "rope"), "rope"),
    "one_side": (M4, (*M4, "--decoder-position-scheme", "m4m"), "m4m"),
}


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "resume") for name in MISMATCHES), ("p2c_index", "restore"), ("p2c_index", "finetune")]
)
def test_other_position_flags_are_refused(corpus, briefly, tmp_path, name, how):
    trained_with, flags, given = MISMATCHES[name]
    source = briefly(*trained_with)
    before = source.read_bytes()
    if how == "resume":
        shutil.copy(source, tmp_path / "checkpoint_last.pt")
    way = {"resume": (), "restore": ("--restore-file", source), "finetune": ("--finetune-from-model", source)}
    with pytest.raises(PositionMismatchError) as caught:
        cli.train(corpus, tmp_path, *flags, *way[how], "--max-update", "4")
    message = str(caught.value)
    assert "trained with [" in message and "the flags say [" in message
    assert given in message.split("the flags say")[1]
    assert given not in message.split("the flags say")[0]
    assert source.read_bytes() == before
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before] * (how == "resume")


def test_finetuning_with_more_positions_starts_where_the_source_stood(corpus, briefly, tmp_path):
    """Sinusoidal to sinusoidal+m4, in encoder and decoder: new tables that are zero, no other."""
    source = briefly("--position-scheme", "sinusoidal")
    flags = ("--position-scheme", "sinusoidal+m4", "--lr", "1e-30", "--warmup-updates", "0")
    more = ("--lr-scheduler", "fixed", "--max-update", "1", "--disable-validation")
    output = cli.train(corpus, tmp_path, *flags, "--finetune-from-model", source, *more)
    assert output.count("conversion: exact     yes") == 2
    before, after = (cli.load(path)["model"] for path in (source, tmp_path / "checkpoint_last.pt"))
    tables = [key for key in after if ".position." in key]
    assert {key.split(".")[0] for key in tables} == {"encoder", "decoder"}
    for key, value in after.items():
        if "scheme_version" not in key:
            expected = torch.zeros_like(value) if key in tables else before[key]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_overrides_that_contradict_the_checkpoint_fail(corpus, briefly):
    overrides = ("--model-overrides", "{'position_scheme': 'm4m'}")
    with pytest.raises(PositionMismatchError, match=r"\[m4 m4\..*\[m4m m4m\."):
        cli.generate(corpus, briefly(*M4), *overrides)
    if FULL:
        output = cli.command("fairseq-generate", *cli.generate_arguments(corpus, briefly(*M4), *overrides), fails=True)
        last = output.strip().splitlines()[-1]
        assert "Traceback" not in output and "H-0" not in output
        assert "PositionMismatchError" in last and "[m4 m4." in last and "[m4m m4m." in last


def test_overrides_that_do_not_touch_positions_work(corpus, briefly):
    output = cli.generate(corpus, briefly(*M4), "--model-overrides", "{'dropout': 0.0}")
    assert len(cli.in_order(output)) == TEST_SENTENCES


# Averaged, EMA and safely loaded checkpoints.


def average(paths: list[Path]) -> dict:
    """As fairseq's scripts/average_checkpoints.py: sum, then divide, integers by //."""
    states, mean = [cli.load(path) for path in paths], {}
    for name in states[0]["model"]:
        total = sum(state["model"][name] for state in states)
        mean[name] = total / len(states) if total.is_floating_point() else total // len(states)
    return {**states[0], "model": mean}


@pytest.mark.parametrize("scheme", ["m4m", "tupe", "learned+t5"])
def test_averaged_and_ema_checkpoints_translate(corpus, tmp_path, scheme):
    flags = ("--position-scheme", scheme, "--max-update", "3", "--disable-validation")
    ema = ("--store-ema", "--ema-decay", "0.5", "--save-interval-updates", "1")
    output = cli.train(corpus, tmp_path, *flags, *ema)
    assert "EMA" in output
    paths = [tmp_path / f"checkpoint_1_{update}.pt" for update in (1, 2, 3)]
    torch.save(average(paths), tmp_path / "average.pt")
    last = cli.load(paths[-1])
    write_average(paths[-1:], tmp_path / "ema.pt", ema=True)
    kept = cli.load(tmp_path / "ema.pt")
    assert all(torch.equal(value, last["extra_state"]["ema"][name]) for name, value in kept["model"].items())
    assert "ema" not in kept["extra_state"]
    with pytest.raises(UserError, match="keeps no moving averages: train with --store-ema"):
        torch.save({**last, "extra_state": {}}, tmp_path / "bare.pt")
        write_average([tmp_path / "bare.pt"], tmp_path / "none.pt", ema=True)
    for name in ("average.pt", "ema.pt"):
        weights = cli.load(tmp_path / name)["model"]
        changed = [k for k, v in weights.items() if not torch.equal(v, last["model"][k])]
        assert any(".self_attn.q_proj.weight" in key for key in changed)
        assert scheme_in(tmp_path / name) == scheme_in(paths[-1])
        assert len(cli.in_order(cli.generate(corpus, tmp_path / name))) == TEST_SENTENCES


def test_fairseq_reads_the_moving_average(corpus, tmp_path):
    ema = ("--store-ema", "--ema-fp32", "--ema-decay", "0.5")
    cli.train(corpus, tmp_path, *M4, *ema, *UPDATES)
    checkpoint = tmp_path / "checkpoint_last.pt"
    saved = cli.load(checkpoint)["extra_state"]
    state = load_ema_from_checkpoint(str(checkpoint))
    torch.save(state, tmp_path / "ema.pt")
    write_average([checkpoint], tmp_path / "ours.pt", ema=True)
    ours = cli.load(tmp_path / "ours.pt")["model"]
    assert all(torch.equal(value, state["model"][key]) for key, value in ours.items())
    name = "encoder.layers.0.self_attn.q_proj.weight"
    assert torch.equal(cli.load(tmp_path / "ema.pt")["model"][name], saved["ema_fp32_params"][name])
    assert len(cli.in_order(cli.generate(corpus, tmp_path / "ema.pt"))) == TEST_SENTENCES
    output = cli.train(corpus, tmp_path, *M4, *ema, "--max-update", "3", "--disable-validation")
    assert "num_updates: 3 >= max_update" in output  # and it resumes


# Precision, recomputation, layer drop.


@pytest.mark.parametrize(
    ("flags", "dtype"),
    {
        "--fp16 --memory-efficient-fp16": torch.float16,
        "--fp16 --fp16-no-flatten-grads": torch.float16,
        "--memory-efficient-bf16": torch.bfloat16,
        "--bf16": torch.bfloat16,
        "--amp": torch.float32,
    }.items(),
)
def test_low_precision_trains(corpus, tmp_path, flags, dtype):
    output = cli.train(corpus, tmp_path, "--position-scheme", "learned+m4m", *flags.split(), "--max-update", "6")
    first, *_, last = cli.losses(output)
    assert last < first
    checkpoint = tmp_path / "checkpoint_last.pt"
    # fairseq saves in fp32 what the model holds in `dtype`.
    weights = cli.load(checkpoint)["model"]
    for name in ("self_attn.q_proj.weight", "self_attn.position.0.table"):
        weight = weights[f"encoder.layers.0.{name}"]
        assert torch.equal(weight.to(dtype).float(), weight)
        assert not weight.isnan().any()
    assert scheme_in(checkpoint).startswith("learned+m4m ")
    assert len(cli.in_order(cli.generate(corpus, checkpoint))) == TEST_SENTENCES


def loss_and_gradients(corpus: Corpus, *flags: str):
    """Loss of one batch and the gradient of every parameter, dropout included."""
    cfg = parsed(corpus, *SMALL, "--criterion", "label_smoothed_cross_entropy", *flags)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    utils.set_torch_seed(1)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    dataset = task.dataset("train")
    utils.set_torch_seed(2)
    loss, *_ = criterion(model.train(), dataset.collater([dataset[i] for i in range(9)]))
    loss.backward()
    return loss.detach(), {name: part.grad for name, part in model.named_parameters()}


# t5 has one table for all layers
@pytest.mark.parametrize(
    "scheme", ["m4", "t5", "learned+tupe --position-share both", "transformer_xl --position-share layers"]
)
@pytest.mark.parametrize("how", ["--checkpoint-activations", "--offload-activations"])
def test_recomputation_changes_nothing(corpus, scheme, how):
    flags = ("--position-scheme", *scheme.split())
    loss, expected = loss_and_gradients(corpus, *flags)
    recomputed, found = loss_and_gradients(corpus, *flags, how)
    torch.testing.assert_close(recomputed, loss)
    assert expected.keys() == {name.replace("._fsdp_wrapped_module", "") for name in found}
    for name, gradient in expected.items():
        assert gradient is not None and found[name] is not None, name
        torch.testing.assert_close(found[name], gradient, msg=lambda text, n=name: f"{n}: {text}")


def test_layer_drop_trains_and_pruned_layers_load(corpus, tmp_path):
    drop = ("--encoder-layerdrop", "0.4", "--decoder-layerdrop", "0.4")
    cli.train(corpus, tmp_path, *M4, *drop, "--max-update", "4")
    checkpoint = tmp_path / "checkpoint_last.pt"
    keep = {"encoder_layers_to_keep": "1", "decoder_layers_to_keep": "0"}
    (model,), _ = load_model_ensemble([str(checkpoint)], arg_overrides=dict(keep))
    saved = cli.load(checkpoint)["model"]
    for side, kept in (("encoder", 1), ("decoder", 0)):
        layers = getattr(model, side).layers
        assert len(layers) == 1
        table = dict(layers.named_parameters())["0.self_attn.position.0.table"]
        assert torch.equal(table, saved[f"{side}.layers.{kept}.self_attn.position.0.table"])
        other = saved[f"{side}.layers.{1 - kept}.self_attn.position.0.table"]
        assert not torch.equal(table, other)
    output = cli.generate(corpus, checkpoint, "--model-overrides", repr(keep))
    assert len(cli.in_order(output)) == TEST_SENTENCES


def test_layer_drop_changes_no_initial_value(corpus):
    states = []
    for drop in ("0.0", "0.9"):
        drops = ("--encoder-layerdrop", drop, "--decoder-layerdrop", drop)
        cfg = parsed(corpus, *SMALL, "--position-scheme", "m4m", *drops)
        task = tasks.setup_task(cfg.task)
        utils.set_torch_seed(1)
        states.append((task.build_model(cfg.model).state_dict(), torch.rand(1)))
    (plain, after), (dropped, after_dropped) = states
    for name, tensor in plain.items():
        assert torch.equal(tensor, dropped[name]), name
    assert torch.equal(after, after_dropped)


# Several processes, and real text.


@pytest.mark.slow
def test_two_processes_train_as_one_with_two_batches(corpus, tmp_path):
    flags = ("--position-scheme", "t5", "--dropout", "0", "--max-tokens", "200")
    flags += ("--max-update", "3")
    single = cli.train(corpus, tmp_path / "one", *flags, "--update-freq", "2")
    both = cli.train_arguments(corpus, tmp_path / "two", *flags, "--distributed-world-size", "2")
    together = cli.forked_training(both, 2, tmp_path / "log")
    assert "training on 2 devices" in together
    assert "num_updates: 3 >= max_update" in together
    assert cli.losses(together) == pytest.approx(cli.losses(single), abs=2e-3)
    assert len(cli.losses(single)) == 3
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("one", "two")]
    one, two = (cli.load(path)["model"] for path in paths)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)
    assert len(cli.in_order(cli.generate(corpus, paths[1]))) == TEST_SENTENCES


def write_captions(source: Path, raw: Path) -> None:
    """The first captions of Multi30k in subwords of a joined vocabulary."""
    sentencepiece = pytest.importorskip("sentencepiece")
    texts = {}
    for split, file, count in (("train", "train", 4000), ("valid", "val", 200), ("test", "test_2016_flickr", 100)):
        for language in ("en", "de"):
            with gzip.open(source / f"{file}.{language}.gz", "rt", encoding="utf-8") as lines:
                texts[split, language] = [next(lines).strip() for _ in range(count)]
    model = io.BytesIO()
    both, how = iter(texts["train", "en"] + texts["train", "de"]), {"model_type": "bpe", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=both, model_writer=model, vocab_size=1500, **how)
    units = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    raw.mkdir(parents=True)
    for (split, language), lines in texts.items():
        pieces = [" ".join(units.encode(line, out_type=str)) for line in lines]
        (raw / f"{split}.{language}").write_text("\n".join(pieces) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_real_text_is_learned(shared_data, tmp_path):
    raw, binary = tmp_path / "raw", tmp_path / "bin"
    write_captions(shared_data / "multi30k", raw)
    cli.binarise(raw, binary, "--testpref", str(raw / "test"), languages=("en", "de"))
    corpus = Corpus(raw, binary)
    flags = "--position-scheme shaw --arch relpos_transformer_tiny --encoder-embed-dim 128 --decoder-embed-dim 128"
    flags += " --max-tokens 1500 --warmup-updates 60 --lr 3e-3 --no-save-optimizer-state"
    search = "--post-process sentencepiece --scoring sacrebleu --max-tokens 4000 --max-len-a 1.2 --max-len-b 10"
    scores, valid = [], []
    for name, updates in (("start", "1"), ("end", "140")):
        log = cli.train(corpus, tmp_path / name, *flags.split(), "--max-update", updates)
        valid.append(cli.losses(log, "valid")[-1])
        output = cli.generate(corpus, tmp_path / name / "checkpoint_last.pt", *search.split())
        assert len(cli.hypotheses(output)) == 100
        scores.append(float(re.search(r"BLEU = ([\d.]+)", output).group(1)))
    print(f"valid loss {valid}, BLEU {scores}")
    assert valid[1] < valid[0] - 2
    assert scores[1] > scores[0] + 0.5
