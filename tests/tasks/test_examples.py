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
# Name: position scheme, architecture, data; flags of training; those of them that evaluation needs too.
EXAMPLES: dict[str, tuple[str, str, str]] = {
    "tied": (
        "rope relpos_transformer pair",
        f"{SMOOTHED} --share-decoder-input-output-embed --no-scale-embedding --layernorm-embedding "
        "--activation-fn gelu --lr-scheduler inverse_sqrt --warmup-updates 2",
        "",
    ),
    "untied": (
        "alibi relpos_transformer pair",
        f"{SMOOTHED} --encoder-normalize-before --decoder-normalize-before --update-freq 2 --left-pad-source",
        "",
    ),
    "alignment": ("shaw relpos_transformer pair", ALIGNED, ""),
    "LayerDrop": (
        "rope/alibi relpos_transformer pair",
        f"{SMOOTHED} --encoder-layerdrop 0.5 --decoder-layerdrop 0.5 --lr-scheduler tri_stage --warmup-steps 2 "
        "--hold-steps 2 --decay-steps 4",
        "",
    ),
    "quantisation noise": (
        "t5 relpos_transformer pair",
        f"{SMOOTHED} --quant-noise-pq 0.1 --quant-noise-pq-block-size 8 --optimizer nag --checkpoint-activations",
        "",
    ),
    "R-drop": ("tupe relpos_transformer pair", DROPPED, ""),
    "adaptive softmax": (
        "deberta relpos_transformer pair",
        "--criterion adaptive_loss --adaptive-softmax-cutoff 8,16",
        "",
    ),
    "no cross-attention": ("kerple relpos_transformer pair", f"{SMOOTHED} --no-cross-attention", ""),
    "moving average": (
        "sinusoidal relpos_transformer pair",
        f"{SMOOTHED} --store-ema --ema-decay 0.9 --decoder-input-dim 16 --decoder-output-dim 24",
        "",
    ),
    "bf16": ("fire relpos_transformer pair", f"{SMOOTHED} --memory-efficient-bf16", ""),
    "cut sources": (
        "learned relpos_transformer pair",
        f"{SMOOTHED} --truncate-source --max-source-positions 6",
        "--truncate-source --max-source-positions 6",
    ),
    "best of several": (
        "xpos relpos_transformer pair",
        f"{SMOOTHED} --keep-best-checkpoints 2 --save-interval-updates 2 --best-checkpoint-metric bleu "
        "--maximize-best-checkpoint-metric --eval-bleu",
        "",
    ),
    "buckets": (
        "none relpos_transformer pair",
        f"{SMOOTHED} --num-batch-buckets 2 --batch-size 8 --sentence-avg --curriculum 1 --optimizer adafactor",
        "",
    ),
    "back-translation": (
        "m1 relpos_transformer mono",
        f"{SMOOTHED} --task online_backtranslation {MONO} --share-all-embeddings",
        MONO,
    ),
    "many-to-many": (
        "pope relpos_transformer pair",
        f"{SMOOTHED} --task translation_multi_simple_epoch {LANGS} --sampling-method temperature",
        LANGS,
    ),
    "mBART": (
        "m4m relpos_transformer pair",
        f"{SMOOTHED} --task translation_from_pretrained_bart --langs src,tgt --share-all-embeddings",
        "--langs src,tgt",
    ),
    "adaptive inputs": ("fox relpos_transformer_lm text", f"{LM} {CUTOFFS} --tie-adaptive-weights", ""),
    "sentences": (
        "cope relpos_transformer_lm text",
        f"{LM} --criterion cross_entropy --share-decoder-input-output-embed --add-bos-token",
        "",
    ),
    "many languages": (
        "alibi+rope relpos_transformer_lm languages",
        "--task multilingual_language_modeling --tokens-per-sample 16 --criterion cross_entropy",
        "",
    ),
    "Transformer-XL": (
        "transformer_xl relpos_transformer_xl text",
        "--task segment_language_modeling --tokens-per-sample 8 --criterion cross_entropy --mem-len 8 --batch-size 4",
        "--batch-size 4",
    ),
    "XLM-R": ("deberta_released relpos_roberta languages", f"--task multilingual_masked_lm {MLM}", ""),
    "RoBERTa": (
        "tupe_released relpos_roberta text",
        f"--task masked_lm {MLM} --untie-weights-roberta --encoder-layerdrop 0.3 --lr-scheduler polynomial_decay "
        "--total-num-update 10 --sample-break-mode eos --clip-norm 1",
        "",
    ),
    "GLUE": (
        "rel_scalar relpos_roberta pairs",
        f"--task sentence_prediction --criterion sentence_prediction {PAIRS} --separator-token 2",
        "--criterion sentence_prediction",
    ),
    "RACE": ("m2 relpos_roberta choices", f"--task sentence_ranking --criterion sentence_ranking {PAIRS}", ""),
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
    for side, places in {
        "src": (mono / "src", text, languages / "src"),
        "tgt": (mono / "tgt", languages / "tgt"),
    }.items():
        for place in places:
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
DRAWN = {EXAMPLES[name][0].split()[1]: name for name in reversed(EXAMPLES)}.values()


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, data: dict[str, Path], tmp_path: Path, capsys) -> None:
    """Six updates are three and three; fairseq's evaluation finds training's loss, and our commands its outputs."""
    for logger in ("fairseq", "relpos_fairseq"):  # our commands silence them
        logging.getLogger(logger).setLevel(logging.INFO)
    (scheme, arch, kind), flags, again = EXAMPLES[name][0].split(), *EXAMPLES[name][1:]
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
    assert cli.losses(cli.call("validate", *where), "valid")[-1] == pytest.approx(
        cli.losses(said, "valid")[-1], abs=2e-3
    )
    if arch == "relpos_transformer":
        sides = [] if kind == "mono" else ["--source-lang", "src", "--target-lang", "tgt"]
        said = cli.call("generate", *where, *sides, "--gen-subset", "valid", "--max-len-b", "6", "--beam", "3")
        found = {int(number): text for number, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", said, re.MULTILINE)}
        assert len(found) == cli.VALID_SENTENCES
        if task != "online_backtranslation":
            languages = ["--source-lang", "src", "--target-lang", "tgt"] if "simple_epoch" in task else []
            more = [*languages, "--on-long-line", "cut"] if "--truncate-source" in again else languages
            arguments = ["--beam", "3", "--max-len-b", "6", "--cpu", *more]
            capsys.readouterr()
            assert cli.relpos("translate", checkpoint, data["lines"], *arguments) == 0
            assert capsys.readouterr().out.split("\n")[:-1] == [found[number] for number in sorted(found)]
    elif arch != "relpos_roberta":
        lengths = ["--tokens-per-sample", re.findall(r"--tokens-per-sample (\S+)", flags)[0]]
        assert "Perplexity" in cli.call("eval_lm", *where, "--gen-subset", "valid", *lengths)
        assert cli.relpos("sample", checkpoint, "--prompt", "w1 w2", "--tokens", "3", "--cpu") == 0
    elif task != "sentence_ranking":
        (tmp_path / "in").write_text("w1 w2\tw1\n" if task == "sentence_prediction" else "w1 <mask>\n")
        job = "classify" if task == "sentence_prediction" else "fill"
        assert cli.relpos(job, checkpoint, tmp_path / "in", "--cpu") == 0, capsys.readouterr().err
    average = [checkpoint, *(["--ema"] if "--store-ema" in flags else [resumed])]
    assert cli.relpos("average", *average, "--out", tmp_path / "average.pt") == 0
    if FULL or name in DRAWN:
        assert cli.relpos("plot", checkpoint, "--out", tmp_path / "plot") == 0, capsys.readouterr().err
