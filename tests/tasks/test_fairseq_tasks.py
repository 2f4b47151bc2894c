"""Each task of fairseq that takes a transformer, a language model or a RoBERTa, with ours: train, save, resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from helpers import ROOT, roberta
from helpers import commands as cli
from helpers.shell import told
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel
from relpos_fairseq.patches import processes
from relpos_fairseq.saved.model import JOBS, MULTILINGUAL

DECODER = "--decoder-embed-dim 32 --decoder-ffn-embed-dim 48 --decoder-layers 2 --decoder-attention-heads 2".split()
TINY = {
    "relpos_transformer": cli.SMALL[2:],
    "relpos_transformer_lm": DECODER,
    "relpos_transformer_xl": DECODER,
    "relpos_roberta": [word.replace("decoder", "encoder") for word in DECODER],
}
LM = ["--tokens-per-sample", "16", "--criterion", "relpos_cross_entropy"]
MLM = ["--tokens-per-sample", "16", "--criterion", "masked_lm", "--max-positions", "32"]
SMOOTHED = ["--criterion", "relpos_label_smoothed_cross_entropy", "--label-smoothing", "0.1"]
TRAIN = """--optimizer relpos_adam --lr 5e-3 --max-tokens 200 --num-workers 0 --cpu --no-progress-bar
    --distributed-world-size 1 --no-epoch-checkpoints --log-interval 1 --position-scheme m4""".split()
LANGS = ["--langs", "src,tgt", "--lang-pairs", "src-tgt,tgt-src"]
MONO = ["--mono-langs", "src,tgt", "--valid-lang-pairs", "src-tgt"]
BART = ["--tokens-per-sample", "16", "--mask", "0.3", "--mask-length", "word", "--replace-length", "1"]
RANKING = "--criterion sentence_ranking --num-classes 2 --max-positions 32 --init-token 0".split()
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
    "sentence_ranking": ("relpos_roberta", "choices", RANKING),
    "denoising": ("relpos_transformer", "text", BART),
    "multilingual_denoising": ("relpos_transformer", "languages", [*BART, "--langs", "src,tgt", "--add-lang-token"]),
    "span_masked_lm": ("relpos_transformer", "text", BART[:2]),
    "translation_from_pretrained_bart": ("relpos_transformer", "pair", ["--langs", "src,tgt"]),
    "online_backtranslation": ("relpos_transformer", "mono", MONO),
}


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory) -> dict[str, Path]:
    """Folders of data: two languages in pairs, one text, and a text for each of two languages."""
    folder = tmp_path_factory.mktemp("data")
    text, languages = folder / "text", folder / "languages"
    for train, destination in (("train", text), ("train", languages / "src"), ("valid", languages / "tgt")):
        words = [] if destination == text else ["--srcdict", text / "dict.txt"]
        files = ["--only-source", "--trainpref", corpus.raw / f"{train}.src", "--validpref", corpus.raw / "valid.src"]
        cli.call("preprocess", *files, *words, "--destdir", destination)
    shutil.copy(text / "dict.txt", languages / "dict.txt")
    mono = shutil.copytree(languages, folder / "mono")  # beside each language alone the pairs that are translated
    shutil.copytree(corpus.binary, mono, dirs_exist_ok=True)
    choices = roberta.write_pairs(folder / "choices")  # which of two sentences goes with the first
    shutil.copytree(choices / "input1", choices / "input2")
    for split in ("train", "valid"):
        labels = (folder / "choices" / "raw" / f"{split}.label").read_text()
        (choices / "label" / f"{split}.label").write_text(labels)
    return {"pair": corpus.binary, "text": text, "languages": languages, "mono": mono, "choices": choices}


def training(name: str, data: dict[str, Path], folder: Path) -> list[str]:
    """The command line of a training of TASKS, without its number of updates."""
    arch, kind, more = TASKS[name]
    given = [data[kind], "--user-dir", cli.USER_DIR, "--save-dir", folder, "--arch", arch, *TINY[arch], *TRAIN]
    given += ["--task", name.partition(" ")[0], *more, *([] if "--criterion" in more else SMOOTHED), "--max-update"]
    return [*map(str, given)]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_saves_and_resumes(name, data, tmp_path):
    arch, kind, _ = TASKS[name]
    given = training(name, data, tmp_path)
    cli.call("train", *given, "2")
    assert (tmp_path / "checkpoint_last.pt").is_file()
    said = cli.call("train", *given, "3")
    assert "num_updates: 3" in said or "3 updates" in said
    assert "loss=0," not in said  # a ranking whose labels are not found trains on nothing
    if arch == "relpos_transformer":
        where = [*given[:3], "--path", str(tmp_path / "checkpoint_last.pt"), *cli.QUIET]  # its task is the checkpoint's
        sides = ["--source-lang", "src", "--target-lang", "tgt"] if kind == "pair" else []
        said = cli.call("generate", *where, *sides, "--gen-subset", "valid", "--max-len-b", "5")
        assert "Translated" in said  # each block of a text
        assert kind not in ("pair", "mono") or len(cli.hypotheses(said)) == cli.VALID_SENTENCES


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", TASKS)
def test_relpos_commands_run_the_checkpoint(name, data, tmp_path, shell):
    """The command of its task, and plot; another command names the right one, in one line."""
    task, checkpoint, text = name.partition(" ")[0], tmp_path / "saved" / "checkpoint_last.pt", tmp_path / "text"
    cli.call("train", *training(name, data, checkpoint.parent), "1")
    text.write_text("w1 <mask>\nw4 <mask>\n" if "masked" in task else "w1 w2 w3\nw4\n")
    languages = ["--source-lang", "src", "--target-lang", "tgt"] if task == MULTILINGUAL else []
    lines = {
        "translate": ("translate --cpu --max-len-b 5", text, *languages),
        "sample": ("sample --cpu --prompt 'w1 w2' --tokens 3",),
        "fill": ("fill --cpu --top-k 1", text),
    }
    for command, (line, *more) in lines.items():
        right = JOBS.get(task)
        if right == f"relpos {command}":
            assert len(shell(line, checkpoint, *more).splitlines()) in (1, 2, 3)
            continue
        error = shell.refused(line, checkpoint, *more)
        assert f"is of task {task}" in error and (f"use {right}" in error) == (right is not None)
    if TASKS[name][0] == "relpos_transformer":
        why = "has key_vectors" if task == "translation" else f"is of task {task}, whose texts have "  # of m4
        assert why in shell.refused("export ct2 --out ct2", checkpoint)
    shell("plot --out plot", checkpoint)
    if TASKS[name][1] in ("text", "choices"):
        shell("plot --out 'plot of data' --data", data[TASKS[name][1]], checkpoint)


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("denoising", "ids of 6 sentences equal"),
        ("online_backtranslation", "none: texts of online_backtranslation have symbols of languages"),
        ("multilingual_denoising", "none: texts of multilingual_denoising have symbols of languages"),
    ],
)
def test_a_task_that_adds_symbols_is_exported(name, tokenizer, data, tmp_path, shell):
    """A tokenizer is written where it can write what the task does: <s> before a text, no symbols of languages."""
    checkpoint, out = tmp_path / "saved" / "checkpoint_last.pt", tmp_path / "folder"
    cli.call("train", *training(name, data, checkpoint.parent), "1")
    assert tokenizer in shell("export transformers --out folder", checkpoint)
    if name == "denoising":
        encode = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        assert encode.convert_ids_to_tokens(encode("w1 <mask>")["input_ids"]) == ["<s>", "w1", "<mask>", "</s>"]
    assert "save_dir" not in json.loads((out / "config.json").read_text())["task"]


def test_a_language_model_of_several_languages_is_evaluated(data, tmp_path, shell):
    """fairseq-eval-lm prints the perplexity that training's validation does; `relpos evaluate lm` reads one."""
    given, checkpoint = training("multilingual_language_modeling", data, tmp_path), tmp_path / "checkpoint_last.pt"
    validated = re.search(r"valid on .*?ppl (\S+)", cli.call("train", *given, "2"))
    where = ["--path", checkpoint, "--gen-subset", "valid", "--cpu"]
    evaluated = re.search(r"Perplexity: (\S+)", cli.call("eval_lm", *given[:3], *where))
    assert float(evaluated[1]) == pytest.approx(float(validated[1]), abs=0.01)
    line, languages = "evaluate lm checkpoint_last.pt --data", data["languages"]
    assert "holds texts of src, tgt: give the folder of one of them" in shell.refused(line, languages)
    assert "window 16" in shell(line, languages / "src")
    own = tmp_path / "own"  # with a split of its own, whatever lies in its subfolders
    shutil.copytree(languages / "src", own)
    shutil.copytree(languages / "tgt", own / "more")
    shell(line, own)
    cli.call("train", *given[:-1], "--add-bos-token", "--save-dir", tmp_path / "bos", "--max-update", "1")
    error = shell.refused("evaluate lm bos/checkpoint_last.pt --data", languages / "src")
    assert "--add-bos-token have symbols of languages" in error


def test_a_classifier_is_validated_as_in_training(data, tmp_path):
    """fairseq-validate takes the criterion, and with it the head's name, from the checkpoint."""
    given = training("sentence_ranking", data, tmp_path)
    given = ["sentence_prediction" if word == "sentence_ranking" else word for word in given]
    loss = r"valid on .*?loss (\S+) .*accuracy (\S+)"
    trained = re.search(loss, cli.call("train", *given, "2"))
    where = ["--path", tmp_path / "checkpoint_last.pt", "--batch-size", "4", "--cpu"]
    assert re.search(loss, cli.call("validate", *given[:3], *where)).groups() == trained.groups()


def test_a_checkpoint_of_several_languages_asks_for_two(data, tmp_path, shell):
    """Translations are fairseq-generate's, and languages that it has not are named."""
    name, text = "translation_multi_simple_epoch", tmp_path / "in.txt"
    given = [str(data["pair"]), "--user-dir", str(cli.USER_DIR), "--save-dir", str(tmp_path), *cli.SMALL, *TRAIN]
    cli.call("train", *given, "--task", name, *TASKS[name][2], *SMOOTHED, "--max-update", "30")
    checkpoint = tmp_path / "checkpoint_last.pt"
    sides = ["--source-lang", "src", "--target-lang", "tgt"]
    where = [*given[:3], "--path", str(checkpoint), "--task", name, *cli.QUIET, *TASKS[name][2], *sides]
    said = cli.call("generate", *where, "--gen-subset", "valid", "--max-len-b", "8", "--beam", "3")
    lines = {kind: re.findall(rf"^{kind}-(\d+)\t(?:\S+\t)?(.*)$", said, re.MULTILINE) for kind in "SH"}
    assert all(line.startswith("__src__ ") or "__" not in line for _, line in lines["S"])
    text.write_text("".join(f"{line.removeprefix('__src__ ')}\n" for _, line in lines["S"]))
    translate = "translate checkpoint_last.pt in.txt --cpu --max-len-b 8 --beam 3"
    assert shell(translate, *sides).splitlines() == [line for _, line in lines["H"]]
    hub = RelPosTransformerModel.from_pretrained(
        str(tmp_path), "checkpoint_last.pt", source_lang="src", target_lang="tgt", beam=3, max_len_b=8
    )
    first = lines["S"][0][1].removeprefix("__src__ ")
    assert hub.translate(first, beam=3, max_len_b=8) == lines["H"][0][1]
    for asked, why in (([], "give --source-lang and --target-lang"), ([*sides[:3], "xx"], "has no language xx")):
        error = shell.refused(translate, *asked)
        assert why in error and "its languages are src, tgt" in error


FAIRSEQS = (
    *("multilingual_translation", "semisupervised_translation", "translation_lev", "translation_from_pretrained_xlm"),
    *("cross_lingual_lm", "legacy_masked_lm", "sentence_prediction_adapters"),
)
NOT_OURS = "not relpos_transformer, ... by translation,"
ADAPTIVE = "--task translation --adaptive-softmax-cutoff 8"
WRONG = {  # a task of another model, a task that lacks what it needs, and losses that do not fit
    **{f"--task {task}": f"--task {task} trains models of fairseq's own, {NOT_OURS}" for task in FAIRSEQS},
    "--task language_modeling": f"language_modeling trains relpos_transformer_lm and relpos_transformer_xl, {NOT_OURS}",
    "--task masked_lm": f"--task masked_lm trains relpos_roberta, {NOT_OURS}",
    "--task translation_from_pretrained_bart": "--task translation_from_pretrained_bart needs --langs",
    "--task online_backtranslation": "--task online_backtranslation needs --mono-langs and --valid-lang-pairs",
    "--arch relpos_roberta --task sentence_prediction": "sentence_prediction needs --criterion sentence_prediction",
    ADAPTIVE: "adaptive softmax ...here [8, ... --criterion adaptive_loss",
    f"{ADAPTIVE} --criterion cross_entropy": "adaptive softmax ...here [8, ... --criterion adaptive_loss",
    f"{ADAPTIVE} --criterion adaptive_loss --tie-adaptive-weights": "--tie-adaptive-weights shares adaptive inputs, "
    "which translation has not",
}


@pytest.mark.parametrize(("line", "said"), WRONG.items())
def test_a_wrong_line_of_a_training(line, said, data, tmp_path):
    small = [] if "--arch" in line else cli.SMALL[:-1]
    given = [data["pair"], "--user-dir", cli.USER_DIR, "--save-dir", tmp_path, *small, *TRAIN]
    with pytest.raises(ValueError, match=told(said)):
        cli.call("train", *given, *([] if "--criterion" in line else SMOOTHED), *line.split())


@pytest.mark.parametrize("arch", ["relpos_transformer_lm", "relpos_transformer_xl", "relpos_roberta"])
def test_a_model_of_another_task_is_refused(arch):
    given = [ROOT, "--user-dir", cli.USER_DIR, "--arch", f"{arch}_tiny", *TRAIN, *SMOOTHED]
    with pytest.raises(ValueError, match=f"--task translation trains relpos_transformer, not {arch}, which"):
        cli.call("train", *given, "--task", "translation")


@pytest.mark.parametrize("arch", ["relpos_transformer", "transformer"])
@pytest.mark.parametrize("share", ["--share-decoder-input-output-embed", "--share-all-embeddings"])
def test_an_adaptive_softmax_beside_a_shared_embedding_is_resumed(arch, share, data, tmp_path, caplog):
    """It has its own weights, of which fairseq's decoder makes the embedding's projection as it loads."""
    given = [data["pair"], "--user-dir", cli.USER_DIR, "--save-dir", tmp_path, "--arch", f"{arch}_tiny", *cli.SMALL[2:]]
    given = [*given[:-1], share, *(TRAIN if "relpos" in arch else TRAIN[:-2]), "--criterion", "adaptive_loss"]
    given += ["--adaptive-softmax-cutoff", "8", "--max-update"]
    cli.call("train", *given, "1")
    assert ("shares nothing" in caplog.text) == (arch == "relpos_transformer" and "decoder" in share)
    assert "num_updates: 2" in cli.call("train", *given, "2")
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    del state["model"]["decoder.adaptive_softmax.head.weight"]
    torch.save(state, tmp_path / "checkpoint_last.pt")
    with pytest.raises(ValueError, match=r"Missing key.*adaptive_softmax"):  # not --max-update
        cli.call("train", *given, "3")


def test_the_page_names_each_task():
    """The table of models/README has a row for each task that is run here."""
    page = (ROOT / "relpos_fairseq" / "models" / "README.md").read_text()
    tried = {name.partition(" ")[0] for name in TASKS}
    served = {name for names in processes.TASKS.values() for name in names}
    assert [name for name in tried | {*FAIRSEQS} if f"`{name}`" not in page] == []
    # Those have tests of their own.
    assert served - tried == {"segment_language_modeling", "sentence_prediction", "question_answering"}
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    assert {task: command for task, command in JOBS.items() if task in rows and f"`{command}" not in rows[task]} == {}
