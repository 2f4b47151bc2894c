"""Trainings in the manner of fairseq's examples: each goes on after a stop as if it had not, and is evaluated."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

from helpers import FULL, roberta
from helpers import commands as cli
from helpers.shell import Shell

ENCODER = "--encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-layers 2 --encoder-attention-heads 2"
DECODER = ENCODER.replace("encoder", "decoder")
SIZES = {
    "relpos_transformer": f"{ENCODER} {DECODER}",
    "relpos_transformer_lm": DECODER,
    "relpos_transformer_xl": DECODER,
    "relpos_roberta": ENCODER,
}
TRAIN = """--optimizer adam --lr 5e-3 --max-tokens 200 --num-workers 0 --cpu --no-progress-bar
    --distributed-world-size 1 --no-epoch-checkpoints --log-interval 1"""
SMOOTHED = "--criterion label_smoothed_cross_entropy --label-smoothing 0.1"
ALIGNED = "--criterion label_smoothed_cross_entropy_with_alignment --label-smoothing 0.1 --load-alignments"
DROPPED = f"{SMOOTHED} --criterion label_smoothed_cross_entropy_with_rdrop --rdrop-alpha 5"
LANGS = "--langs src,tgt --lang-pairs src-tgt,tgt-src --encoder-langtok src --decoder-langtok"
MONO = "--mono-langs src,tgt --valid-lang-pairs src-tgt"
LM = "--task language_modeling --tokens-per-sample 16"
CUTOFFS = "--criterion adaptive_loss --adaptive-input --adaptive-input-cutoff 8,16 --adaptive-softmax-cutoff 8,16"
MLM = "--criterion masked_lm --tokens-per-sample 16"
PAIRS = "--num-classes 2 --init-token 0 --max-positions 32 --batch-size 8"
# Name: position scheme, architecture, data, and flags of training.
EXAMPLES = {
    "tied": f"rope relpos_transformer pair {SMOOTHED} --share-decoder-input-output-embed --no-scale-embedding "
    "--layernorm-embedding --activation-fn gelu --lr-scheduler inverse_sqrt --warmup-updates 2",
    "untied": f"alibi relpos_transformer pair {SMOOTHED} --encoder-normalize-before --decoder-normalize-before "
    "--update-freq 2 --left-pad-source",
    "alignment": f"shaw relpos_transformer pair {ALIGNED}",
    "LayerDrop": f"rope/alibi relpos_transformer pair {SMOOTHED} --encoder-layerdrop 0.5 --decoder-layerdrop 0.5 "
    "--lr-scheduler tri_stage --warmup-steps 2 --hold-steps 2 --decay-steps 4",
    "quantisation noise": f"t5 relpos_transformer pair {SMOOTHED} --quant-noise-pq 0.1 --quant-noise-pq-block-size 8 "
    "--optimizer nag --checkpoint-activations",
    "R-drop": f"tupe relpos_transformer pair {DROPPED}",
    "adaptive softmax": "deberta relpos_transformer pair --criterion adaptive_loss --adaptive-softmax-cutoff 8,16",
    "no cross-attention": f"kerple relpos_transformer pair {SMOOTHED} --no-cross-attention",
    "moving average": f"sinusoidal relpos_transformer pair {SMOOTHED} --store-ema --ema-decay 0.9 "
    "--decoder-input-dim 16 --decoder-output-dim 24",
    "bf16": f"fire relpos_transformer pair {SMOOTHED} --memory-efficient-bf16",
    "cut sources": f"learned relpos_transformer pair {SMOOTHED} --truncate-source --max-source-positions 6",
    "best of several": f"xpos relpos_transformer pair {SMOOTHED} --keep-best-checkpoints 2 --save-interval-updates 2 "
    "--best-checkpoint-metric bleu --maximize-best-checkpoint-metric --eval-bleu",
    "buckets": f"none relpos_transformer pair {SMOOTHED} --num-batch-buckets 2 --batch-size 8 --sentence-avg "
    "--curriculum 1 --optimizer adafactor",
    "back-translation": f"m1 relpos_transformer mono {SMOOTHED} --task online_backtranslation {MONO} "
    "--share-all-embeddings",
    "many-to-many": f"pope relpos_transformer pair {SMOOTHED} --task translation_multi_simple_epoch {LANGS} "
    "--sampling-method temperature",
    "mBART": f"m4m relpos_transformer pair {SMOOTHED} --task translation_from_pretrained_bart --langs src,tgt "
    "--share-all-embeddings",
    "adaptive inputs": f"fox relpos_transformer_lm text {LM} {CUTOFFS} --tie-adaptive-weights",
    "sentences": f"cope relpos_transformer_lm text {LM} --criterion cross_entropy --share-decoder-input-output-embed "
    "--add-bos-token",
    "many languages": "alibi+rope relpos_transformer_lm languages --task multilingual_language_modeling "
    "--tokens-per-sample 16 --criterion cross_entropy",
    "Transformer-XL": "transformer_xl relpos_transformer_xl text --task segment_language_modeling "
    "--tokens-per-sample 8 --criterion cross_entropy --mem-len 8 --batch-size 4",
    "XLM-R": f"deberta_released relpos_roberta languages --task multilingual_masked_lm {MLM}",
    "RoBERTa": f"tupe_released relpos_roberta text --task masked_lm {MLM} --untie-weights-roberta "
    "--encoder-layerdrop 0.3 --lr-scheduler polynomial_decay --total-num-update 10 --sample-break-mode eos "
    "--clip-norm 1",
    "GLUE": f"rel_scalar relpos_roberta pairs --task sentence_prediction --criterion sentence_prediction {PAIRS} "
    "--separator-token 2",
    "RACE": f"m2 relpos_roberta choices --task sentence_ranking --criterion sentence_ranking {PAIRS}",
}
# Those flags that evaluation needs too.
AGAIN = {
    "cut sources": "--truncate-source --max-source-positions 6",
    "back-translation": MONO,
    "many-to-many": LANGS,
    "mBART": "--langs src,tgt",
    "Transformer-XL": "--batch-size 4",
    "GLUE": "--criterion sentence_prediction",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Folders of data by kind; the pairs of `pair` have alignments, and `mono` has texts of one language too."""
    folder = tmp_path_factory.mktemp("data")
    raw = cli.write_corpus(folder / "corpus").raw
    pair, mono, text, languages = (folder / name for name in ("pair", "mono", "text", "languages"))
    for split in ("train", "valid"):
        counts = [len(line.split()) for line in (raw / f"{split}.src").read_text().splitlines()]
        lines = [" ".join(f"{place}-{count - 1 - place}" for place in range(count)) for count in counts]
        (raw / f"{split}.align").write_text("\n".join(lines) + "\n")
    cli.binarise(raw, pair, "--align-suffix", "align")
    shutil.copytree(pair, mono)
    words = shutil.copy(pair / "dict.src.txt", mono / "dict.txt")
    for place in (mono / "src", text, languages / "src", mono / "tgt", languages / "tgt"):
        side = "tgt" if place.name == "tgt" else "src"
        files = ["--trainpref", raw / f"train.{side}", "--validpref", raw / f"valid.{side}"]
        cli.call("preprocess", "--only-source", *files, "--srcdict", words, "--destdir", place)
    shutil.copy(words, languages / "dict.txt")
    pairs, choices = roberta.write_pairs(folder / "pairs"), folder / "choices"
    shutil.copytree(pairs, choices)
    shutil.copytree(choices / "input1", choices / "input2")
    for split in ("train", "valid"):
        shutil.copy(folder / "pairs" / "raw" / f"{split}.label", choices)
    return {"pair": pair, "mono": mono, "text": text, "languages": languages, "pairs": pairs, "choices": choices} | {
        "lines": raw / "valid.src"
    }


# The first of each architecture; with RELPOS_ONNX=full all of them.
DRAWN = {EXAMPLES[name].split()[1]: name for name in reversed(EXAMPLES)}.values()


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, data: dict[str, Path], tmp_path: Path, shell: Shell) -> None:
    """Six updates are three and three; fairseq's evaluation finds training's loss, and our commands its outputs."""
    for logger in ("fairseq", "relpos_fairseq"):  # our commands silence them
        logging.getLogger(logger).setLevel(logging.INFO)
    scheme, arch, kind, flags = EXAMPLES[name].split(maxsplit=3)
    again = AGAIN.get(name, "")
    task = (re.findall(r"--task (\S+)", flags) or ["translation"])[0]
    given = [data[kind], "--user-dir", cli.USER_DIR, "--arch", arch, *f"{SIZES[arch]} {TRAIN} {flags}".split()]
    given += ["--position-scheme", scheme, "--save-dir"]
    said = cli.call("train", *given, tmp_path / "straight", "--max-update", "6")
    for updates in ("3", "6"):
        cli.call("train", *given, tmp_path / "resumed", "--max-update", updates)
    checkpoint, resumed = (tmp_path / run / "checkpoint_last.pt" for run in ("straight", "resumed"))
    other = cli.load(resumed)["model"]
    for key, value in cli.load(checkpoint)["model"].items():
        assert key.endswith("_float_tensor") or torch.equal(value, other[key]), key  # a buffer that nothing fills

    where = [data[kind], "--user-dir", cli.USER_DIR, "--path", checkpoint, "--task", task, *cli.QUIET, *again.split()]
    where += [] if "--batch-size" in again else ["--max-tokens", "200"]
    trained, validated = (cli.losses(text, "valid")[-1] for text in (said, cli.call("validate", *where)))
    assert validated == pytest.approx(trained, abs=2e-3)
    if arch == "relpos_transformer":
        sides = [] if kind == "mono" else ["--source-lang", "src", "--target-lang", "tgt"]
        said = cli.call("generate", *where, *sides, "--gen-subset", "valid", "--max-len-b", "6", "--beam", "3")
        found = {int(number): text for number, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", said, re.MULTILINE)}
        assert len(found) == cli.VALID_SENTENCES
        if task != "online_backtranslation":
            languages = ["--source-lang", "src", "--target-lang", "tgt"] if "simple_epoch" in task else []
            more = [*languages, "--on-long-line", "cut"] if "--truncate-source" in again else languages
            said = shell("translate --beam 3 --max-len-b 6 --cpu", checkpoint, data["lines"], *more)
            assert said.split("\n")[:-1] == [found[number] for number in sorted(found)]
    elif arch != "relpos_roberta":
        lengths = ["--tokens-per-sample", re.findall(r"--tokens-per-sample (\S+)", flags)[0]]
        assert "Perplexity" in cli.call("eval_lm", *where, "--gen-subset", "valid", *lengths)
        shell("sample --prompt 'w1 w2' --tokens 3 --cpu", checkpoint)
    elif task != "sentence_ranking":
        (tmp_path / "in").write_text("w1 w2\tw1\n" if task == "sentence_prediction" else "w1 <mask>\n")
        shell(f"{'classify' if task == 'sentence_prediction' else 'fill'} straight/checkpoint_last.pt in --cpu")
    shell("average --out average.pt", checkpoint, "--ema" if "--store-ema" in flags else resumed)
    if FULL or name in DRAWN:
        shell("plot --out plot", checkpoint)
