"""Each task of fairseq that takes a transformer, a language model or a RoBERTa, with ours: train, save, resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers import ROOT, roberta
from helpers import commands as cli

TINY = {
    "relpos_transformer": cli.SMALL[2:],
    "relpos_transformer_lm": ["--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "48", "--decoder-layers", "2"],
    "relpos_transformer_xl": ["--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "48", "--decoder-layers", "2"],
    "relpos_roberta": ["--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "48", "--encoder-layers", "2"],
}
LM = ["--tokens-per-sample", "16", "--criterion", "relpos_cross_entropy"]
MLM = ["--tokens-per-sample", "16", "--criterion", "masked_lm", "--max-positions", "32"]
SMOOTHED = ["--criterion", "relpos_label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
TRAIN = """--optimizer relpos_adam --lr 5e-3 --max-tokens 200 --num-workers 0 --cpu --no-progress-bar
    --distributed-world-size 1 --no-epoch-checkpoints --log-interval 1 --position-scheme m4""".split()
LANGS = ["--langs", "src,tgt", "--lang-pairs", "src-tgt,tgt-src"]
BART = ["--tokens-per-sample", "16", "--mask", "0.3", "--mask-length", "word", "--replace-length", "1"]
TASKS = {
    "translation": ("relpos_transformer", "pair", []),
    "translation_multi_simple_epoch": ("relpos_transformer", "pair", [*LANGS, "--decoder-langtok"]),
    "multilingual_language_modeling": (
        "relpos_transformer_lm",
        "languages",
        [*LM, "--multilang-sampling-alpha", "0.7"],
    ),
    "language_modeling": ("relpos_transformer_lm", "text", LM),
    "language_modeling xl": ("relpos_transformer_xl", "text", LM),
    "masked_lm": ("relpos_roberta", "text", MLM),
    "multilingual_masked_lm": ("relpos_roberta", "languages", MLM[:4]),
    "sentence_ranking": (
        "relpos_roberta",
        "choices",
        ["--criterion", "sentence_ranking", "--num-classes", "2", "--max-positions", "32", "--init-token", "0"],
    ),
    "denoising": ("relpos_transformer", "text", BART),
    "multilingual_denoising": ("relpos_transformer", "languages", [*BART, "--langs", "src,tgt", "--add-lang-token"]),
    "translation_from_pretrained_bart": ("relpos_transformer", "pair", ["--langs", "src,tgt"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Folders of data: two languages in pairs, one text, and a text for each of two languages."""
    folder = tmp_path_factory.mktemp("data")
    pair = cli.write_corpus(folder / "corpus")
    text, languages = folder / "text", folder / "languages"
    for train, destination in (("train", text), ("train", languages / "src"), ("valid", languages / "tgt")):
        words = [] if destination == text else ["--srcdict", text / "dict.txt"]
        files = ["--only-source", "--trainpref", pair.raw / f"{train}.src", "--validpref", pair.raw / "valid.src"]
        cli.call("preprocess", *files, *words, "--destdir", destination)
    shutil.copy(text / "dict.txt", languages / "dict.txt")
    choices = roberta.write_pairs(folder / "choices")  # which of two sentences goes with the first
    shutil.copytree(choices / "input1", choices / "input2")
    for split in ("train", "valid"):
        labels = (folder / "choices" / "raw" / f"{split}.label").read_text()
        (choices / f"{split}.label").write_text(labels)
    return {"pair": pair.binary, "text": text, "languages": languages, "choices": choices}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_saves_and_resumes(name, data, tmp_path):
    arch, kind, more = TASKS[name]
    task, _, heads = name.partition(" ")
    side = "encoder" if "roberta" in arch else "decoder"
    heads = [] if arch == "relpos_transformer" else [f"--{side}-attention-heads", "2"]
    given = [
        *(str(data[kind]), "--user-dir", str(cli.USER_DIR), "--save-dir", str(tmp_path), "--arch", arch),
        *(*TINY[arch], *heads, *TRAIN, "--task", task, *more, *([] if "--criterion" in more else SMOOTHED)),
    ]
    cli.call("train", *given, "--max-update", "2")
    assert (tmp_path / "checkpoint_last.pt").is_file()
    said = cli.call("train", *given, "--max-update", "3")
    assert "num_updates: 3" in said or "3 updates" in said
    if kind == "pair":
        where = [*given[:3], "--path", str(tmp_path / "checkpoint_last.pt"), "--task", task, *cli.QUIET, *more]
        sides = ["--source-lang", "src", "--target-lang", "tgt", "--gen-subset", "valid", "--max-len-b", "5"]
        assert len(cli.hypotheses(cli.call("generate", *where, *sides))) == cli.VALID_SENTENCES


@pytest.mark.parametrize("task", ["multilingual_translation", "translation_lev"])
def test_a_task_of_another_model_is_refused(task, data, tmp_path):
    given = [str(data["pair"]), "--user-dir", str(cli.USER_DIR), "--save-dir", str(tmp_path), *cli.SMALL, *TRAIN]
    given += ["--lang-pairs", "src-tgt"] if task == "multilingual_translation" else []
    with pytest.raises(ValueError, match=f"--task {task} trains .* alone"):
        cli.call("train", *given, "--task", task, *SMOOTHED)


def test_the_page_names_each_task():
    """The table of models/README has a row for each task that is run here."""
    page = (ROOT / "relpos_fairseq" / "models" / "README.md").read_text()
    assert [name for name in TASKS if f"`{name.partition(' ')[0]}`" not in page] == []
