"""Commands on models of some of a checkpoint's layers: evaluated by overrides, fine-tuned, resumed, averaged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from helpers import FULL, roberta
from helpers import commands as cli
from helpers.segment_corpus import TASK, arguments
from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.core.plan import decode_text

LAYERS = 4
STILL = ("--lr", "0", "--max-update", "1", "--disable-validation")  # what is saved is what was loaded
SIDES = [("encoder",), ("decoder",), *([("encoder", "decoder")] if FULL else [])]


def keeping(sides: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Layers 1 and 2 of some sides, of rope/t5: as flags of fairseq-train, and as overrides."""
    flags = [part for side in sides for part in (f"--{side}-layers-to-keep", "2,1")]
    return flags, ["--model-overrides", repr({f"{side}_layers_to_keep": "2,1" for side in sides})]


def options(path: Path) -> dict:
    return cli.load(path)["cfg"]["model"]


@pytest.fixture(scope="module")
def whole(corpus: cli.Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four layers a side, trained with LayerDrop."""
    folder = tmp_path_factory.mktemp("whole")
    drop = ("--encoder-layerdrop", "0.2", "--decoder-layerdrop", "0.2")
    cli.train(corpus, folder, *TRANSLATION, *drop, "--max-update", "20", "--disable-validation")
    return folder / "checkpoint_last.pt"


TRANSLATION = f"""--position-scheme rope/t5 --position-share layers --position-rope-base 100 --encoder-layers {LAYERS}
    --decoder-layers {LAYERS}""".split()


@pytest.mark.parametrize("sides", SIDES, ids="+".join)
@pytest.mark.usefixtures("unrendered")
def test_translation(corpus: cli.Corpus, whole: Path, tmp_path: Path, sides: tuple[str, ...], shell) -> None:
    """Fine-tuned with flags and evaluated by overrides are one model, which every command loads without a flag."""
    flags, overrides = keeping(sides)
    start = (*TRANSLATION, *flags, "--finetune-from-model", whole)
    cli.train(corpus, tmp_path, *start, *STILL)
    path = tmp_path / "checkpoint_last.pt"
    expected = cli.scores(cli.generate(corpus, whole, *overrides))
    assert cli.scores(cli.generate(corpus, path)) == expected != cli.scores(cli.generate(corpus, whole))
    saved = options(path)
    for side in ("encoder", "decoder"):
        assert saved[f"{side}_layers"] == (2 if side in sides else LAYERS)
        assert saved[f"{side}_position_scheme"] == ("t5/rope" if side in sides else "auto")
        assert saved[f"{side}_layers_to_keep"] is None
    said = cli.train(corpus, tmp_path, *start, *STILL[:2], "--max-update", "2", "--disable-validation")
    assert f"Loaded checkpoint {path} (epoch 1 @ 1 updates)" in said
    shell("average checkpoint_last.pt checkpoint_last.pt --out mean.pt")
    assert cli.scores(cli.generate(corpus, tmp_path / "mean.pt")) == expected
    (tmp_path / "some.src").write_text("w1 w2\n")
    shell("translate mean.pt some.src --max-len-b 5 --cpu")
    shell("plot checkpoint_last.pt --out plots")


def test_an_option_that_only_layers_left_out_take(corpus: cli.Corpus, whole: Path, tmp_path: Path) -> None:
    flags = [part for side in ("encoder", "decoder") for part in (f"--{side}-layers-to-keep", "1,3")]
    cli.train(corpus, tmp_path, *TRANSLATION, *flags, "--finetune-from-model", whole, *STILL)
    saved = options(tmp_path / "checkpoint_last.pt")
    assert (saved["encoder_position_scheme"], saved["position_rope_base"]) == ("t5", "auto")
    assert saved["position_share"] == "layers"


def test_what_is_refused(corpus: cli.Corpus, whole: Path, tmp_path: Path) -> None:
    flags, _ = keeping(("decoder",))
    with pytest.raises(ConversionError, match="for all of them: give --reset-optimizer"):
        cli.train(corpus, tmp_path, *TRANSLATION, *flags, "--restore-file", whole, *STILL)
    reset = [f"--reset-{what}" for what in ("optimizer", "dataloader", "lr-scheduler", "meters")]
    cli.train(corpus, tmp_path, *TRANSLATION, *flags, "--restore-file", whole, *reset, *STILL)
    assert options(tmp_path / "checkpoint_last.pt")["decoder_layers"] == 2
    more = (*TRANSLATION, "--decoder-layers", "6", *flags, "--finetune-from-model", whole)
    with pytest.raises(ValueError, match="has 4 layers, not 6: give --decoder-layers 4"):
        cli.train(corpus, tmp_path / "other", *more, *STILL)
    again = (*TRANSLATION, *flags, "--finetune-from-model", tmp_path / "checkpoint_last.pt")
    with pytest.raises(ValueError, match="has 2 layers, not 4: give --decoder-layers 2"):
        cli.train(corpus, tmp_path / "other", *again, *STILL)
    with pytest.raises(ValueError, match="--encoder-layers-to-keep 0,4: give numbers of 0 to 3"):
        cli.generate(corpus, whole, "--model-overrides", repr({"encoder_layers_to_keep": "0,4"}))


def test_training_from_nothing(corpus: cli.Corpus, tmp_path: Path) -> None:
    """The model has the layers that are kept, and so has its config."""
    cli.train(corpus, tmp_path, *TRANSLATION, *keeping(("encoder",))[0], *STILL)
    saved = cli.load(tmp_path / "checkpoint_last.pt")
    assert saved["cfg"]["model"]["encoder_layers"] == 2
    assert decode_text(saved["model"]["encoder.positions.scheme_version"]).startswith("t5/rope ")
    assert len(cli.scores(cli.generate(corpus, tmp_path / "checkpoint_last.pt"))) == cli.TEST_SENTENCES


@pytest.mark.parametrize("window", ["none", "every"])
def test_memory(stream: Path, tmp_path: Path, window: str) -> None:
    """Transformer-XL by segments."""
    model = f"--position-scheme transformer_xl/rope/none --decoder-layers {LAYERS} --window-positions {window}"
    given = ["train", *arguments(stream, tmp_path / "whole", *model.split())]
    cli.call(*given, "--max-update", "4")
    whole, flags = tmp_path / "whole" / "checkpoint_last.pt", ("--decoder-layers-to-keep", "1,2")
    cli.call(*given, *flags, *STILL, "--save-dir", tmp_path / "kept", "--finetune-from-model", whole)

    def loss(path: Path, *more: str) -> str:
        rows = ("--gen-subset", "valid", "--batch-size", "1")
        said = cli.evaluate("eval_lm", stream, path, *TASK, *rows, *more)
        return re.search(r"Loss \(base 2\): [\d.]+", said)[0]

    kept = tmp_path / "kept" / "checkpoint_last.pt"
    assert loss(kept) == loss(whole, "--model-overrides", "{'decoder_layers_to_keep': '1,2'}") != loss(whole)
    assert options(kept)["position_scheme"] == "rope/none"
    again = [*given, *flags, *STILL, "--save-dir", tmp_path / "again", "--restore-file", whole, "--reset-optimizer"]
    with pytest.raises(ConversionError, match="memory for all of them: give --reset-optimizer --reset-dataloader"):
        cli.call(*again)
    cli.call(*again, "--reset-dataloader", "--reset-lr-scheduler", "--reset-meters")
    assert loss(tmp_path / "again" / "checkpoint_last.pt") == loss(kept)


RANKING = "--task sentence_ranking --criterion sentence_ranking --num-classes 2 --init-token 0".split()
PREDICTION = """--task sentence_prediction --criterion sentence_prediction_glue --num-classes 2 --init-token 0
    --separator-token 2""".split()


@pytest.mark.parametrize(("task", "sized"), [(PREDICTION, True), (RANKING, True), ([], True), (PREDICTION, False)])
def test_roberta(tmp_path: Path, task: list[str], sized: bool) -> None:
    """Pre-trained, then fine-tuned with some of its layers, whether or not other positions are asked for."""
    packed, pairs = roberta.write_packed(tmp_path / "packed"), roberta.write_pairs(tmp_path / "pairs")
    shutil.copy(pairs / "input0" / "dict.txt", packed / "dict.txt")
    shutil.copytree(pairs / "input1", pairs / "input2")
    for split in ("train", "valid"):
        shutil.copy(tmp_path / "pairs" / "raw" / f"{split}.label", pairs / f"{split}.label")
    model = [*roberta.ARCH, *roberta.OPTIMIZE, "--encoder-layers", str(LAYERS), "--position-scheme", "alibi/rope"]
    sample = [*roberta.MASKED_LM, "--tokens-per-sample", "24", "--sample-break-mode", "complete"]
    cli.call("train", packed, *model, *sample, "--max-update", "3", "--save-dir", tmp_path / "whole")
    whole, out = tmp_path / "whole" / "checkpoint_last.pt", tmp_path / "kept"
    where = [packed, *sample] if not task else [pairs, *task, "--max-positions", "24", "--batch-size", "4"]
    flags = ["--encoder-layers-to-keep", "0,2", "--finetune-from-model", whole, "--save-dir", out]
    given = ["train", *where, *model, *flags, "--find-unused-parameters", *STILL]
    given += [] if sized else ["--segment-encoding", "head"]
    cli.call(*given)
    saved = cli.load(out / "checkpoint_last.pt")
    assert (saved["cfg"]["model"]["encoder_layers"], saved["cfg"]["model"]["position_scheme"]) == (2, "alibi")
    before, name = cli.load(whole)["model"], "encoder.sentence_encoder.layers.{}.fc1.weight"
    for new, old in enumerate((0, 2)):
        assert torch.equal(saved["model"][name.format(new)], before[name.format(old)])
    said = cli.call(*given, "--max-update", "2")
    assert "(epoch 1 @ 1 updates)" in said
    where = [part for part in where if part not in ("--max-positions", "24")] if task == RANKING else where
    valid = ["validate", *where, "--user-dir", cli.USER_DIR, *cli.QUIET]
    assert cli.losses(cli.call(*valid, "--path", out / "checkpoint_last.pt", "--batch-size", "4"), "valid")
