"""Strings of a config are read as values; nothing of them is run."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import fairseq
import pytest
import torch
from fairseq import options, utils
from fairseq.data.multilingual import multilingual_data_manager
from fairseq.models import fconv, wav2vec

import relpos_fairseq  # noqa: F401
from helpers import USER_DIR
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.patches.literal_options import calls_eval, guard_modules, read_literal
from relpos_fairseq.saved.model import check_trusted

ROOT = Path(fairseq.__file__).resolve().parent
ATTACK = "__import__('os').environ.__setitem__('RELPOS_ATTACK', '1')"
# Files that no option of a checkpoint reaches: fairseq's examples. Those of them that a --user-dir loads are
# guarded when they are loaded; the others are programs that a user starts by their path.
EXAMPLES = "examples"


def sources() -> list[Path]:
    """The files of the installed fairseq and of its commands."""
    return sorted(path for root in (ROOT, ROOT.with_name("fairseq_cli")) for path in root.rglob("*.py"))


def test_every_eval_of_fairseq_is_accounted_for() -> None:
    """No module outside the examples calls the builtin function, nor `exec`."""
    calling = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        calls = re.findall(r"(?<![\w.])(eval|exec)\(", text)
        assert "exec" not in calls or "def exec(" in text, path
        if calls and calls_eval(str(path)):
            calling.append(path)
        elif calls:
            tree = ast.walk(ast.parse(text))
            assert not any(isinstance(n, ast.Name) and n.id in ("eval", "exec") for n in tree), path
    assert len(calling) > 25
    core = [path for path in calling if path.relative_to(ROOT.parent).parts[:2] != (ROOT.name, EXAMPLES)]
    assert len(core) > 15
    for path in core:
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except ImportError:  # a package that it needs is not installed: nothing reaches it
                continue
            guard_modules()
        assert vars(sys.modules[name])["eval"] is read_literal, name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("{'beam':5}", {"beam": 5}),
        ("1e-3,5e-4", (1e-3, 5e-4)),
        ("[(512, 3)] * 20", [(512, 3)] * 20),
        ("[(512, 3)] * 9 + [(1024, 3)] * 4 + 2 * [(2048, 1)]", [(512, 3)] * 9 + [(1024, 3)] * 4 + [(2048, 1)] * 2),
        ("((32, 3, 2, 2, True),) * 2", ((32, 3, 2, 2, True),) * 2),
        ("-1", -1),
        (" 1/4 ", 0.25),
        ("False", False),
        ("{1, 2}", {1, 2}),
        ("'a'", "a"),
    ],
)
def test_literals_have_the_value_of_eval(text: str, value: object) -> None:
    """What fairseq's flags take is what it was."""
    assert read_literal(text) == value == eval(text)


CALLS = [ATTACK, f"[{ATTACK}]", f"{{'a': {ATTACK}}}", f"[0] * len([{ATTACK}])", "(lambda: 1)()", "[x for x in (1,)]"]
NAMES = ["beam", "f'{1}'", "().__class__", "[0][0]", "1; 2", "{**{}}", "1 / 0", "", "\0"]
MEMORY = ["9 ** 9 ** 9", "[0] * 10**9", "[0] * 1000000000", "([0] * 90000) * 2", "'a' * 1000000000", "1 << 99"]


@pytest.mark.parametrize("text", [*CALLS, *NAMES, *MEMORY, "(" * 10_000, "-" * 100_000 + "1"])
def test_everything_else_is_refused_in_one_line(text: str) -> None:
    """Calls, names, powers and what would fill the memory."""
    with pytest.raises(ValueError, match="nothing else is run") as error:
        read_literal(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert "RELPOS_ATTACK" not in os.environ


def test_references_of_other_modules_are_guarded() -> None:
    """`from fairseq.utils import eval_str_list` holds the function, whose `eval` is replaced."""
    for function in (utils.eval_str_list, options.eval_str_list, multilingual_data_manager.eval_str_dict):
        with pytest.raises(ValueError, match="nothing else is run"):
            function(ATTACK)
    with pytest.raises(ValueError, match="nothing else is run"):
        options.eval_bool(ATTACK)
    assert options.eval_str_list("1e-3,5e-4") == [1e-3, 5e-4] and options.eval_str_list("4", type=int) == [4]
    assert options.eval_bool("True") is True and options.eval_bool(None) is False and options.eval_bool(True) is False
    assert options.eval_str_dict("{'en': 'x'}") == {"en": "x"} and utils.eval_str_list(None) is None
    for module in (fconv, wav2vec.wav2vec2):
        assert vars(module)["eval"] is read_literal
    assert "RELPOS_ATTACK" not in os.environ


def test_a_user_dir_of_fairseqs_examples_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is loaded later is read as literals as well."""
    monkeypatch.setattr("relpos_fairseq.patches.literal_options.ROOTS", (f"{tmp_path.resolve()}/",))
    (tmp_path / "later_plugin").mkdir()
    (tmp_path / "later_plugin" / "__init__.py").write_text("def read(text):\n    return eval(text)\n")
    utils.import_user_module(Namespace(user_dir=str(tmp_path / "later_plugin")))
    later = sys.modules["later_plugin"]
    assert later.read("[1] * 2") == [1, 1]
    with pytest.raises(ValueError, match="nothing else is run"):
        later.read(ATTACK)


def test_a_user_dir_that_is_this_package_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name in any folder, or by a link to it; another folder of that name is an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "relpos_fairseq").symlink_to(USER_DIR)
    searched = list(sys.path)
    for given in ("relpos_fairseq", "links/relpos_fairseq", str(USER_DIR)):
        utils.import_user_module(Namespace(user_dir=given))
    assert sys.path == searched
    (tmp_path / "relpos_fairseq").mkdir()
    with pytest.raises(ImportError, match="not globally unique"):
        utils.import_user_module(Namespace(user_dir="relpos_fairseq"))


def cfg(model: object, task: object) -> dict:
    """A loaded checkpoint that names a model and a task."""
    return {"cfg": {"model": model, "task": task}, "args": Namespace(arch="fconv")}


def test_commands_build_known_models_alone() -> None:
    """A checkpoint may name any class of fairseq; the older form of its options is not read past the check."""
    translation, named = SimpleNamespace(_name="translation"), lambda name: SimpleNamespace(_name=name)
    for name in ("relpos_transformer_tiny", "transformer", "transformer_iwslt_de_en", "relpos_transformer", "lstm"):
        state = cfg(named(name), translation)
        check_trusted(state, "a.pt")
        assert state["args"] is None
    for name in ("fconv", "fconv_wmt_en_de", "wav2vec2", "nonautoregressive_transformer", "unknown", None):
        with pytest.raises(UserError, match=re.escape(f"a.pt holds a model {name!r}")):
            check_trusted(cfg(named(name), translation), "a.pt")
    for task in (named("audio_finetuning"), SimpleNamespace(_name="translation", task="audio_finetuning")):
        with pytest.raises(UserError, match="a.pt is of task 'audio_finetuning'"):
            check_trusted(cfg(named("transformer"), task), "a.pt")
    with pytest.raises(UserError, match="no options"):
        check_trusted({"model": {}, "cfg": None}, "a.pt")


@pytest.mark.parametrize("field", ["adaptive_softmax_cutoff", "adaptive_input_cutoff"])
def test_a_checkpoints_string_is_not_run(field: str) -> None:
    """The option that our language model gives to fairseq's decoder."""
    from fairseq.data import Dictionary

    from relpos_fairseq.models.relpos_transformer_lm import RelPosTransformerLanguageModel
    from relpos_fairseq.models.relpos_transformer_lm import RelPosTransformerLMConfig as Config

    words = Dictionary()
    for number in range(12):
        words.add_symbol(f"w{number}")
    options = Config(decoder_embed_dim=8, decoder_ffn_embed_dim=8, decoder_layers=1, decoder_attention_heads=2)
    options.tokens_per_sample = options.max_target_positions = 16
    options.adaptive_input = field == "adaptive_input_cutoff"
    options.decoder_input_dim = options.decoder_output_dim = 8
    setattr(options, field, ATTACK)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words)
    with torch.no_grad(), pytest.raises(ValueError, match="nothing else is run"):
        RelPosTransformerLanguageModel.build_model(options, task)
    assert "RELPOS_ATTACK" not in os.environ
