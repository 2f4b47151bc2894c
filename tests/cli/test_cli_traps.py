"""What goes wrong in silence with fairseq, and what users get wrong: each must be right or loud."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.checkpoint_utils import load_model_ensemble
from fairseq.data import data_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models import distributed_fairseq_model as wrapper
from fairseq.models.transformer import TransformerConfig
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer

import relpos_fairseq
from helpers import FULL
from helpers import commands as cli
from helpers.commands import SMALL, TEST_SENTENCES, USER_DIR, Corpus, Malicious
from helpers.fault_jobs import finished
from relpos_fairseq import plugin
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.models.relpos_transformer import RelPosTransformerConfig, nested
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.patches import arguments, checkpoints, training
from relpos_fairseq.patches.training import quiet_warnings

UPDATES = ("--max-update", "2", "--disable-validation")


def test_help_has_the_flags_of_a_model():
    """That of fairseq alone ends before it knows which model it is."""
    start = ("fairseq-train", "--user-dir", USER_DIR, "--optimizer", "adam")
    text = " ".join(cli.command(*start, "--arch", "relpos_transformer_tiny", "--help").split())
    assert "--position-buckets" in text and "number of buckets; 0: none, a scalar for each distance" in text
    assert "--encoder-layers" in text and "--adam-betas" in text
    other = cli.command(*start, "-atransformer_lm", "-h")
    assert "--decoder-layers" in other and "--position-buckets" not in other


# T1: the tail of the data.


def test_training_sees_every_sentence(corpus, tmp_path):
    output = cli.train(corpus, tmp_path, "--max-epoch", "1", "--required-batch-size-multiple", "64")
    (line,) = re.findall(r"INFO \| train \| .*", output)
    updates = cli.value(line, "num_updates")
    assert cli.value(line, "bsz") * updates == pytest.approx(400, abs=updates * 0.06)


# T2 and T3: the config.


def test_models_do_not_share_configs():
    one = nested(RelPosTransformerConfig(encoder_embed_dim=64, position_scheme="m4"))
    two = nested(RelPosTransformerConfig(encoder_embed_dim=96, decoder_layers=2))
    assert (one.encoder.embed_dim, two.encoder.embed_dim) == (64, 96)
    assert (one.decoder.layers, two.decoder.layers) == (6, 2)
    assert (one.position_scheme, two.position_scheme) == ("m4", "sinusoidal")
    assert TransformerConfig().encoder.embed_dim == TransformerConfig().decoder.embed_dim == 512
    assert TransformerConfig().decoder.layers == 6


def test_two_models_in_one_process_keep_their_own_config(briefly):
    flags = [("--position-scheme", "m4"), ("--position-scheme", "rope", "--decoder-layers", "1")]
    models = [load_model_ensemble([str(briefly(*each))])[0][0] for each in flags]
    assert [len(model.decoder.layers) for model in models] == [2, 1]
    assert [model.encoder.positions.plan.name for model in models] == ["m4", "rope"]


def test_fairseq_models_are_left_alone(corpus, tmp_path):
    """The plugin is loaded, but fairseq's own transformer trains and translates as ever."""
    own = ("--arch", "transformer_tiny", "--no-token-positional-embeddings", *UPDATES)
    output = cli.train(corpus, tmp_path, *own)
    assert "positions of" not in output
    state = cli.load(tmp_path / "checkpoint_last.pt")
    assert not any("position" in name for name in state["model"])
    translated = cli.in_order(cli.generate(corpus, tmp_path / "checkpoint_last.pt"))
    assert len(translated) == TEST_SENTENCES


# T5: the encoder's fast path would skip our attention.


def test_no_layer_takes_the_fast_path(translator, monkeypatch):
    (model,), _ = load_model_ensemble([str(translator)])
    assert [layer.can_use_fastpath for layer in model.encoder.layers] == [False, False]
    asked = []
    original = RelPosMultiheadAttention.forward

    def forward(self, *given, **more):
        asked.append(self)
        return original(self, *given, **more)

    monkeypatch.setattr(RelPosMultiheadAttention, "forward", forward)
    with torch.no_grad():
        model.eval().encoder(torch.tensor([[5, 6, 7, 2]]), torch.tensor([4]))
    assert asked == [layer.self_attn for layer in model.encoder.layers]


# T8 and the ways to load the plugin.


FORGOTTEN = """
import sys
from fairseq_cli import generate, train
given, end = sys.argv[1:], sys.argv.index("--")
for command, sys.argv[1:] in ((train, ["."] + given[:end - 1]), (generate, given[end:])):
    try:
        command.cli_main()
    except SystemExit:
        pass
"""


@pytest.mark.slow
def test_forgotten_user_dir(corpus, translator, tmp_path):
    arguments = cli.generate_arguments(corpus, translator)
    at = arguments.index("--user-dir")
    script = tmp_path / "forgotten.py"
    script.write_text(FORGOTTEN)
    forgotten = arguments[:at] + arguments[at + 2 :]
    output = cli.command("python", script, *SMALL, "--", *forgotten, fails=True, cwd=tmp_path)
    assert "argument --arch/-a: invalid choice: 'relpos_transformer_tiny'" in output
    assert "KeyError: \"'_name'\"" in output.strip().splitlines()[-1]


BOTH_WAYS = """
import sys
from argparse import Namespace
from fairseq import utils
from fairseq.models import MODEL_REGISTRY
user_dir, order = sys.argv[1:]
ways = [lambda: utils.import_user_module(Namespace(user_dir=user_dir)), lambda: __import__("relpos_fairseq")]
one, other = ways if order == "user_dir_first" else reversed(ways)
one()
first = MODEL_REGISTRY["relpos_transformer"]
other(), ways[0]()
import relpos_fairseq
from relpos_fairseq.models.relpos_transformer import SIZES
assert MODEL_REGISTRY["relpos_transformer"] is first
assert set(SIZES) <= set(MODEL_REGISTRY)
print("version", relpos_fairseq.__version__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["user_dir_first", "import_first"] if FULL else ["user_dir_first"])
def test_import_and_user_dir_in_one_process(tmp_path, order):
    script = tmp_path / "both.py"
    script.write_text(BOTH_WAYS)
    output = cli.command("python", script, USER_DIR, order, cwd=tmp_path, PYTHONPATH=str(cli.ROOT))
    assert f"version {relpos_fairseq.__version__}" in output


def test_registering_twice_changes_nothing():
    import fairseq.distributed.utils as distributed

    def state():
        registries = [dict(one) for one in (MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, ARCH_CONFIG_REGISTRY)]
        replaced = [data_utils.batch_by_size, checkpoint_utils.load_checkpoint_to_cpu, Trainer.load_checkpoint]
        replaced += [FairseqTask.filter_indices_by_size, wrapper.DistributedDataParallel]
        replaced += [distributed._infer_torch_distributed_launch_init]
        return registries, replaced, len(torch.serialization.get_safe_globals())

    before = state()
    plugin.register()
    importlib.reload(relpos_fairseq)
    utils.import_user_module(Namespace(user_dir=str(USER_DIR)))
    utils.import_user_module(Namespace(user_dir=str(USER_DIR)))
    assert state() == before


def load_in_child(path: str, connection) -> None:
    """Load a model in a process that shares no memory with the test's."""
    hub = importlib.import_module("fairseq.checkpoint_utils")
    importlib.import_module("relpos_fairseq")
    (model,), _ = hub.load_model_ensemble([path])
    total = sum(part.double().sum().item() for part in model.parameters())
    connection.send((model.encoder.positions.plan.describe(), total))


@pytest.mark.nightly
@pytest.mark.slow
def test_spawned_processes_load_the_plugin(translator):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=load_in_child, args=(str(translator), theirs))
    child.start()
    assert ours.poll(120), "the child said nothing"
    described, total = ours.recv()
    child.join(60)
    assert child.exitcode == 0
    (model,), _ = load_model_ensemble([str(translator)])
    assert described == model.encoder.positions.plan.describe()
    assert total == pytest.approx(sum(part.double().sum().item() for part in model.parameters()))


# What users get wrong.


@pytest.mark.slow
def test_bad_flag_ends_the_command(corpus, tmp_path):
    """Hydra's; fairseq-train and -generate end so in test_cli_translation.py."""
    config = ("--config-dir", "examples/translation/config", "--config-name", "tiny")
    folders = (f"task.data={corpus.binary}", f"checkpoint.save_dir={tmp_path}")
    data = (*folders, "task.source_lang=src", "task.target_lang=tgt", "++common.cpu=true")
    wrong = f"common.user_dir={USER_DIR}", "model.position_scheme=none+m4"
    output = cli.command("fairseq-hydra-train", *config, *data, *wrong, fails=True)
    assert output.strip().splitlines()[-1].startswith("ValueError: position scheme none+m4: ")
    assert "Traceback" not in output


def test_a_bug_keeps_its_traceback(capsys, monkeypatch):
    """Only what this package raises of its input is one line."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    training.print_errors_in_one_line()
    for error in ("relpos_fairseq.schemes.parse_hybrid('m5')", "int('x')", "[][1]"):
        try:
            eval(error, {"relpos_fairseq": relpos_fairseq})
        except Exception as caught:
            sys.excepthook(type(caught), caught, caught.__traceback__)
        said = capsys.readouterr().err
        assert ("Traceback" in said) == ("parse_hybrid" not in error), said
    assert training.is_about_input(None) is False


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt(), "interrupted\n"), (BrokenPipeError(32, "x"), "")])
def test_an_interrupted_command_ends_in_a_word(error: BaseException, said: str, tmp_path, monkeypatch) -> None:
    """Of fairseq's, which have no handler."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    training.print_errors_in_one_line()
    assert finished(lambda: sys.excepthook(type(error), error, None) or 1, tmp_path / "log") == 1
    assert (tmp_path / "log").read_text() == said


@pytest.mark.parametrize(
    ("flag", "value"),
    [("lenpen", "nan"), ("temperature", "inf"), ("unkpen", "-inf"), ("max_len_a", "nan"), ("lr_shrink", "nan")],
)
def test_no_number_of_fairseqs_is_nan(flag: str, value: str) -> None:
    """And none of a search is infinite; a limit of a training may be."""
    with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')} must be a finite number, got {value}"):
        arguments.refuse_misfit(Namespace(**{flag: float(value)}))
    arguments.refuse_misfit(Namespace(clip_norm=float("inf")))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError("--sampling requires --nbest to be equal to --beam"), "--sampling requires --nbest"),
        (OSError("Model file not found: a.pt"), "Model file not found: a.pt"),
        (FileNotFoundError(2, "No such file or directory", "in.txt"), "in.txt: No such file or directory"),
        (ModuleNotFoundError("no", name="editdistance"), "this needs editdistance, which is not installed"),
        (AssertionError("15 < 15"), None),
        (OSError("odd"), None),
    ],
)
def test_errors_that_tell_their_cause_are_one_line(error, said):
    """Whoever raises them: what is asserted of a flag, a file or package that is missing."""
    found = training.described(error)
    assert found is None if said is None else found.startswith(said)


def test_the_beginning_of_a_flag_is_refused_as_fairseq_does(corpus, tmp_path):
    with pytest.raises(SystemExit):
        cli.train(corpus, tmp_path, "--left-pad", "False", *UPDATES)


def train_by(corpus: Corpus, folder: Path, *optimizer: str) -> str:
    """Train without the optimizer that the other tests have, and with the flags given in its place."""
    given = [*map(str, cli.train_arguments(corpus, folder, "--disable-validation"))]
    flags = [n for n, one in enumerate(given) if one.startswith(("--optimizer", "--adam", "--label"))]
    left_out = {*flags, *(n + 1 for n in flags)}
    return cli.call("train", *(part for place, part in enumerate(given) if place not in left_out), *optimizer)


def test_a_resume_under_another_optimizer(corpus, tmp_path):
    """In bf16 fairseq takes the other optimizer's state, and fails at the first step."""
    four, fixed = ("--max-update", "4"), ("--lr-scheduler", "fixed")
    adam = ("--bf16", "--optimizer", "adam", *fixed)
    train_by(corpus, tmp_path, *adam, "--max-update", "2")
    for other, said in {
        ("--bf16", "--optimizer", "nag", *fixed): "--optimizer adam, and this .* has --optimizer nag: give the former",
        (*adam, "--criterion", "cross_entropy"): "--criterion .*label.*, and this .* has --criterion cross_entropy",
        ("--optimizer", "adam", *fixed): "--bf16, and this training has fp32",
        (*adam, "--encoder-layers", "3"): "--encoder-layers 2, and this training has --encoder-layers 3",
        (*adam, "--lr-scheduler", "cosine"): "--lr-scheduler fixed, .*cosine: give the former, or --reset-lr-scheduler",
    }.items():
        with pytest.raises(ValueError, match=rf"checkpoint_last\.pt was trained with {said}"):
            train_by(corpus, tmp_path, *four, *other)
    assert "num_updates: 4" in train_by(corpus, tmp_path, *four, "--bf16", "--optimizer", "relpos_adam", *fixed)
    train_by(corpus, tmp_path, "--max-update", "6", "--bf16", "--optimizer", "nag", *fixed, "--reset-optimizer")


def test_a_process_that_is_given_a_checkpoint_says_what_fairseq_does():
    """Of several processes one reads the file, and can say what it was trained with."""

    def refuse(*unused):
        raise AssertionError("Optimizer does not match; please reset the optimizer (--reset-optimizer). Adam vs NAG")

    with pytest.raises(UserError, match=r"a\.pt is not .*reset the optimizer .*Adam vs NAG"):
        checkpoints.load_or_explain(refuse, [], None, "a.pt", False)


TRUNCATED = "{path} ({size:,} bytes) is truncated or no checkpoint: copy it again"
EMPTY = "{path} is no fairseq checkpoint: it holds no model"
# What makes a checkpoint a file that is none, and what is said of it.
BROKEN = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), TRUNCATED),
    "empty": (lambda path: path.write_bytes(b""), TRUNCATED),
    "text": (lambda path: path.write_text("this is no checkpoint\n" * 50), TRUNCATED),
    "foreign": (lambda path: torch.save({"weight": torch.zeros(3)}, path), EMPTY),
    "tensor": (lambda path: torch.save(torch.zeros(3), path), EMPTY),
    "code": (lambda path: torch.save({"model": Malicious()}, path), "{path} holds code or objects (posix.mkdir)"),
}
TOOLS = {"average": "--out out.pt", "convert": "--to m4 --out out"}


@pytest.mark.parametrize(
    ("how", "tool"),
    [*((how, tool) for how in BROKEN for tool in ("train", "generate")), *(("code", tool) for tool in TOOLS)],
)
def test_broken_checkpoint_is_refused(corpus, translator, tmp_path, how, tool, shell):
    path, (damage, said) = tmp_path / "checkpoint_last.pt", BROKEN[how]
    shutil.copy(translator, path)
    damage(path)
    before = path.read_bytes()
    if tool in TOOLS:
        message = shell.refused(f"{tool} {path} {TOOLS[tool]}").strip()
    else:
        with pytest.raises(ValueError) as caught:
            if tool == "train":
                cli.train(corpus, tmp_path, "--position-scheme", "m4", *UPDATES)
            else:
                cli.generate(corpus, path)
        message = str(caught.value)
    assert said.format(path=path, size=len(before)) in message
    assert "\n" not in message and "weights_only" not in message
    assert ("was refused" in message) == (how == "code")
    assert ("truncated" in message) == (said == TRUNCATED)
    assert path.read_bytes() == before and not (tmp_path / "ran").exists()


# Length limits.


def left_out(output: str) -> str:
    """The only line that says how many samples are left out."""
    (warning,) = [line for line in output.splitlines() if "samples left out" in line]
    return warning


def test_long_samples_are_counted_and_the_flag_is_named(corpus, translator):
    long = [n for n, line in enumerate(corpus.lines("test", "src")) if len(line.split()) + 1 > 8]  # its end is a token
    assert 3 < len(long) < TEST_SENTENCES - 3
    limit = ("--max-source-positions", "8", "--skip-invalid-size-inputs-valid-test")
    output = cli.generate(corpus, translator, *limit)
    assert sorted(cli.hypotheses(output)) == sorted(set(range(TEST_SENTENCES)) - set(long))
    warning = left_out(output)
    assert warning.startswith("WARNING | relpos_fairseq.") and "--max-source-positions" in warning
    assert f"{len(long)} of {TEST_SENTENCES} samples left out" in warning


def test_samples_longer_than_a_batch_are_counted_and_the_flag_is_named(corpus, tmp_path):
    output = cli.train(corpus, tmp_path, "--max-tokens", "8", *UPDATES)
    lengths = [len(line.split()) + 1 for line in corpus.lines("train", "src")]
    warning = left_out(output)
    assert f"{sum(n > 8 for n in lengths)} of 400 samples left out" in warning and "--max-tokens" in warning


def test_long_sample_without_skipping_names_the_flag_that_raises_the_limit(corpus, translator):
    with pytest.raises(Exception, match=r"\(8, 1024\)") as caught:
        cli.generate(corpus, translator, "--max-source-positions", "8")
    assert "--max-source-positions" in str(caught.value) and "table" not in str(caught.value)


SHORT = ("--beam", "1", "--max-len-b", "5")


def interactive(corpus: Corpus, checkpoint: Path, folder: Path, length: int, *more: str) -> str:
    """Translate one sentence of `length` tokens, its end included."""
    source = folder / "source.txt"
    source.write_text(" ".join(f"w{n % 24}" for n in range(length - 1)) + "\n")
    return cli.evaluate("interactive", corpus.binary, checkpoint, "--input", source, *SHORT, *more)


@pytest.mark.parametrize("scheme", ["m4", "sinusoidal", *(["t5", "transformer_xl", "rope"] if FULL else [])])
def test_scheme_without_a_table_of_positions_takes_any_length(corpus, briefly, tmp_path, scheme):
    checkpoint = briefly("--position-scheme", scheme)
    raised = ("--max-source-positions", "1500")
    output = interactive(corpus, checkpoint, tmp_path, 1500, *raised)
    assert len(cli.hypotheses(output)) == 1
    (source,) = re.findall(r"^S-0\t(.*)$", output, re.MULTILINE)
    assert len(source.split()) == 1499
    with pytest.raises(Exception, match="1024"):
        interactive(corpus, checkpoint, tmp_path, 1500)


@pytest.mark.parametrize("scheme", ["learned", "tupe_a", "abs_scalar"])
def test_table_of_positions_refuses_longer_input(corpus, briefly, tmp_path, scheme):
    flags = ("--position-scheme", scheme, "--max-source-positions", "30")
    checkpoint = briefly(*flags, "--max-target-positions", "40")
    assert len(cli.hypotheses(interactive(corpus, checkpoint, tmp_path, 30))) == 1
    # fairseq asks the model for its limit, and refuses before the model is called.
    with pytest.raises(Exception, match=r"31.*\(30, 40\)") as caught:
        interactive(corpus, checkpoint, tmp_path, 31, "--max-source-positions", "1500")
    message = str(caught.value)
    assert f"{scheme} has a table of 30" in message and "relative scheme" in message
    # Left out rather than refused, the warning must not promise that the flag helps.
    raised = ("--max-source-positions", "1500", "--skip-invalid-size-inputs-valid-test")
    output = interactive(corpus, checkpoint, tmp_path, 31, *raised)
    assert "1 of 1 samples left out" in left_out(output) and "table" in left_out(output)


def test_table_of_positions_explains_itself(corpus, briefly):
    checkpoint = briefly("--position-scheme", "learned", "--max-source-positions", "30")
    (model,), _ = load_model_ensemble([str(checkpoint)])
    with pytest.raises(ValueError) as caught:
        model.encoder(torch.full((1, 31), 5), torch.tensor([31]))
    for said in ("learned", "30", "31", "--max-source-positions", "relative scheme"):
        assert said in str(caught.value)


# The rest of the numpy and torch traps.


def test_batch_buckets(corpus, tmp_path):
    flags = ("--num-batch-buckets", "3", "--position-scheme", "tupe")
    output = cli.train(corpus, tmp_path, *flags, *UPDATES)
    assert "bucketing source lengths" in output
    translated = cli.generate(corpus, tmp_path / "checkpoint_last.pt", "--num-batch-buckets", "3")
    plain = cli.generate(corpus, tmp_path / "checkpoint_last.pt")
    assert len(cli.in_order(translated)) == TEST_SENTENCES and "left out" not in plain
    assert cli.scores(translated) == pytest.approx(cli.scores(plain), abs=1e-4)


@pytest.mark.parametrize("scheme", ["tupe", "rope", *(["learned", "m4", "abs_scalar"] if FULL else [])])
def test_padding_on_the_right_translates_the_same(corpus, briefly, scheme):
    checkpoint = briefly("--position-scheme", scheme)
    left = cli.generate(corpus, checkpoint)
    right = cli.generate(corpus, checkpoint, "--left-pad-source")
    assert "'left_pad_source': True" in left and "'left_pad_source': False" in right
    assert len(cli.in_order(right)) == TEST_SENTENCES
    assert cli.scores(left) == pytest.approx(cli.scores(right), abs=1e-4)


def test_no_warning_is_printed(corpus, tmp_path, recwarn):
    quiet_warnings()
    cli.train(corpus, tmp_path, "--position-scheme", "m4", *UPDATES)
    assert [str(warning.message)[:80] for warning in recwarn.list] == []


SEARCHES = ["--print-alignment hard", "--sampling --sampling-topk 3 --beam 1", "--prefix-size 1", "--nbest 2"]
SEARCHES += ["--match-source-len", "--retain-dropout", "--memory-efficient-fp16"]


@pytest.mark.parametrize("options", SEARCHES)
def test_search_options_work(corpus, translator, options):
    output = cli.generate(corpus, translator, *options.split())
    numbers = re.findall(r"^H-(\d+)\t", output, re.MULTILINE)
    best = 2 if "--nbest" in options else 1
    assert sorted(map(int, numbers)) == sorted(list(range(TEST_SENTENCES)) * best)
    if "--print-alignment" in options:
        assert len(re.findall(r"^A-\d+\t\d+-\d+", output, re.MULTILINE)) == TEST_SENTENCES
    if "--match-source-len" in options:
        # fairseq counts the source's end, and ends the output only after as many tokens.
        sources = corpus.lines("test", "src")
        for number, scores in re.findall(r"^P-(\d+)\t(.*)$", output, re.MULTILINE):
            assert len(scores.split()) == len(sources[int(number)].split()) + 2


def test_reference_scores_are_the_validation_loss(corpus, translator):
    output = cli.generate(corpus, translator, "--score-reference")
    tokens = [float(score) for line in re.findall(r"^P-\d+\t(.*)$", output, re.MULTILINE) for score in line.split()]
    assert len(tokens) == sum(len(line.split()) + 1 for line in corpus.lines("test", "tgt"))
    validated = cli.evaluate("validate", corpus.binary, translator, "--valid-subset", "test", "--batch-size", "5")
    assert cli.value(validated, "nll_loss") == pytest.approx(-np.mean(tokens), abs=2e-3)


def test_schemes_translate_together(corpus, briefly):
    schemes = ("m4", "rope", "learned")
    paths = [str(briefly("--position-scheme", scheme)) for scheme in schemes]
    together, alone = cli.generate(corpus, ":".join(paths)), cli.generate(corpus, paths[0])
    assert len(cli.in_order(together)) == TEST_SENTENCES
    assert cli.scores(together) != pytest.approx(cli.scores(alone), abs=1e-4)


def test_bf16_does_not_mean_a_tpu(corpus):
    from fairseq import options

    arguments = [str(corpus.binary), *SMALL, "--bf16"]
    args = options.parse_args_and_arch(options.get_training_parser(), input_args=arguments)
    assert args.bf16 and not args.tpu
