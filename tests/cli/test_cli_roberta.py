"""The real fairseq commands on RoBERTa: pre-train, resume, fine-tune, validate, and the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli.hydra_train import _hydra_main
from omegaconf import OmegaConf

from helpers import FULL, recipes
from helpers import commands as cli
from helpers.commands import USER_DIR, call
from helpers.roberta import ARCH, MASKED_LM, OPTIMIZE
from relpos_fairseq.core.placement import PositionMismatchError
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.text import train_tokenizer
from relpos_fairseq.text.assets import WORD_STARTS_FILE, word_starts

PACKED = ["--tokens-per-sample", "24", "--sample-break-mode", "complete"]
BRIEF = ["--max-update", "3", "--disable-validation"]
GLUE = """--task sentence_prediction --criterion sentence_prediction_glue --num-classes 2 --init-token 0
    --separator-token 2 --batch-size 4 --max-positions 24 --find-unused-parameters""".split()
BOS, PAD, EOS = 0, 1, 2


def pretrain(data: Path, save: Path, *more: str) -> str:
    flags = [*ARCH, *OPTIMIZE, *MASKED_LM, *PACKED, *more]
    return call("train", str(data), *flags, "--save-dir", str(save))


def masked_lm(data: Path, *more: str):
    """A masked_lm task, set up by its command line."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, [str(data), *ARCH, *MASKED_LM, *PACKED, *more])
    return tasks.setup_task(convert_namespace_to_omegaconf(args).task)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["sentence", "learned+rel_scalar", *(["learned", "m4m", "tupe"] if FULL else [])])
def test_pre_training_and_validation(packed: Path, tmp_path: Path, scheme: str) -> None:
    flags = ["--position-scheme", scheme, "--max-epoch", "2"]
    output = pretrain(packed, tmp_path, *flags)
    assert cli.losses(output)[-1] < cli.losses(output)[0]
    validated = cli.evaluate("validate", packed, tmp_path / "checkpoint_last.pt", *MASKED_LM)
    # Masks are drawn anew each epoch, and fairseq-validate's is epoch 1.
    assert cli.losses(validated, "valid")[0] == pytest.approx(cli.losses(output, "valid")[-1], 0.2)
    assert cli.load(tmp_path / "checkpoint_last.pt")["cfg"]["model"]["position_scheme"] == scheme


@pytest.mark.slow
def test_resume_is_exact(packed: Path, tmp_path: Path) -> None:
    """Inside epoch 1 and beyond it: masks, batches, dropout and Adam go on as if never stopped."""
    flags = ["--position-scheme", "tupe+m4", "--position-scale", "2", "--disable-validation"]
    flags += ["--update-epoch-batch-itr", "True"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(packed, whole, *flags, "--max-update", "9")
    for stop in ("2", "7", "9"):
        pretrain(packed, parts, *flags, "--max-update", stop)
    epochs = cli.load(parts / "checkpoint_last.pt")["extra_state"]["train_iterator"]["epoch"]
    assert epochs > 1
    cli.assert_same_state(whole / "checkpoint_last.pt", parts / "checkpoint_last.pt")


@pytest.mark.slow
def test_bf16_and_recomputation(packed: Path, tmp_path: Path) -> None:
    """--bf16 does not look for a TPU; a resume goes on."""
    flags = ["--bf16", "--checkpoint-activations", "--position-scheme", "m4m"]
    for stop in ("2", "3"):
        output = pretrain(packed, tmp_path, *flags, "--max-update", stop, "--disable-validation")
    assert "num_updates: 3 >= max_update" in output
    tensors = cli.load(tmp_path / "checkpoint_last.pt")["model"].values()
    assert all(value.isfinite().all() for value in tensors)


@pytest.mark.slow
def test_hydra(packed: Path, tmp_path: Path) -> None:
    """The same options as model.*; bf16 by common.bf16."""
    (tmp_path / "small.yaml").write_text("# @package _group_\n")
    overrides = f"""task._name=masked_lm task.data={packed} task.tokens_per_sample=24 task.sample_break_mode=complete
        criterion._name=masked_lm model._name=relpos_roberta_tiny model.position_scheme=m4 model.encoder_embed_dim=16
        model.encoder_attention_heads=2 optimizer._name=adam optimization.lr=[0.001] optimization.max_update=2
        lr_scheduler._name=fixed checkpoint.save_dir={tmp_path / "save"} dataset.batch_size=8 dataset.num_workers=0
        common.bf16=true common.cpu=true common.user_dir={USER_DIR} distributed_training.distributed_world_size=1"""
    with cli.captured() as output:
        _hydra_main(recipes.composed(tmp_path, "small", *(f"++{one}" for one in overrides.split())))
    assert "positions of encoder: m4 " in output.getvalue()
    assert cli.load(tmp_path / "save" / "checkpoint_last.pt")["cfg"]["common"]["bf16"]


def test_blocks_hold_whole_sentences(packed: Path) -> None:
    """--sample-break-mode complete: every block ends with a sentence, and none is lost."""
    task = masked_lm(packed)
    blocks = task._load_dataset_split("train", 1, False)
    lines = (packed.parent / "raw" / "train.txt").read_text().splitlines()
    words = []
    for index in range(len(blocks)):
        block = blocks[index].tolist()
        assert block[0] == BOS and block[-1] == EOS and len(block) <= 24
        words += block[1:]
    dictionary = task.source_dictionary
    expected = [[*(dictionary.index(word) for word in line.split()), EOS] for line in lines]
    assert words == [number for line in expected for number in line]


def masks(task, epoch: int) -> list[list[int]]:
    """Targets of the first blocks in an epoch."""
    task.datasets["train"].set_epoch(epoch)
    return [task.datasets["train"][index]["target"].tolist() for index in range(8)]


def test_masks_are_drawn_anew_each_epoch(packed: Path) -> None:
    task = masked_lm(packed)
    task.load_dataset("train")
    first, second = masks(task, 1), masks(task, 2)
    assert first != second and masks(task, 1) == first


def whole_words(packed: Path, folder: Path) -> Path:
    """The data with odd words declared continuations."""
    data = folder / "bin"
    shutil.copytree(packed, data)
    dictionary = masked_lm(packed).source_dictionary
    flags = [not dictionary[number].endswith(("1", "3", "5", "7", "9")) for number in range(len(dictionary) - 1)]
    (data / WORD_STARTS_FILE).write_text("".join(f"{int(flag)}\n" for flag in flags))
    return data


def test_whole_words_are_masked(packed: Path, tmp_path: Path) -> None:
    """A word is masked with all its continuations or not at all."""
    data = whole_words(packed, tmp_path)
    task = masked_lm(data, "--mask-whole-words", "--mask-prob", "0.4")
    task.load_dataset("train")
    starts = word_starts(data, task.source_dictionary)
    assert starts[:4].all() and starts[-1] == 1 and not starts.all()
    blocks, seen = task._load_dataset_split("train", 1, False), 0
    for sample in (task.datasets["train"][index] for index in range(10)):
        tokens, masked = blocks[int(sample["id"])], sample["target"].ne(PAD)
        for place in range(1, len(tokens)):
            if not starts[tokens[place]]:
                seen += int(masked[place])
                assert masked[place] == masked[place - 1]
    assert seen


@pytest.mark.slow
def test_training_with_whole_words(packed: Path, tmp_path: Path) -> None:
    output = pretrain(whole_words(packed, tmp_path), tmp_path / "s", *BRIEF, "--mask-whole-words")
    assert len(cli.losses(output)) == 3


def test_whole_words_of_a_tokenizer_beside_the_data(packed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("unbelievable believer beliefs\n" * 20)
    tokenizer = train_tokenizer("wordpiece", tmp_path, files=[text], vocab_size=40)
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    starts = word_starts(tmp_path, dictionary)
    for number in range(dictionary.nspecial, len(dictionary)):
        assert bool(starts[number]) == tokenizer.begins_word(dictionary[number])
    assert not starts.all()


@pytest.mark.parametrize(
    ("content", "said"),
    {
        None: f"neither {WORD_STARTS_FILE} .* nor a tokenizer",
        "1\n0\nyes\n": f"{WORD_STARTS_FILE}:3: expected 0 or 1, got 'yes'",
        "1\n" * 7: "7 lines and the dictionary .* prepare the data again",
    }.items(),
)
def test_wrong_word_starts(content: str | None, said: str, packed: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / WORD_STARTS_FILE).write_text(content)
    with pytest.raises(ValueError, match=said):
        word_starts(tmp_path, masked_lm(packed).source_dictionary)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["learned", "m4"])
def test_resume_with_other_positions(packed: Path, tmp_path: Path, scheme: str) -> None:
    """Tables of another length are named, with the flag that decides it."""
    flags = ["--position-scheme", scheme, "--disable-validation"]
    pretrain(packed, tmp_path, *flags, "--max-update", "1")
    with pytest.raises(PositionMismatchError, match=r"checkpoint_last.pt: .*table.*--max-positions"):
        pretrain(packed, tmp_path, *flags, "--max-update", "2", "--max-positions", "30")


def finetune(data: Path, save: Path, *more: str) -> str:
    flags = [str(data), *ARCH, *OPTIMIZE, *GLUE, "--segment-encoding", "head", *more]
    return call("train", *flags, "--save-dir", str(save))


@pytest.mark.slow
def test_fine_tuning_resumes(pairs: Path, tmp_path: Path) -> None:
    flags = ["--position-scheme", "m4", "--update-epoch-batch-itr", "True", "--disable-validation"]
    finetune(pairs, tmp_path / "whole", *flags, "--max-update", "20")
    for stop in ("4", "17", "20"):
        finetune(pairs, tmp_path / "parts", *flags, "--max-update", stop)
    cli.assert_same_state(*(tmp_path / part / "checkpoint_last.pt" for part in ("whole", "parts")))


@pytest.mark.slow
def test_samples_longer_than_max_positions(pairs: Path, tmp_path: Path) -> None:
    """Said in training with the flag that lets them in, and an error in validation."""
    short = ["--max-positions", "12", "--position-scheme", "m4", "--max-update", "2"]
    with pytest.raises(ValueError, match="since max_positions=12.*raise --max-positions"):
        finetune(pairs, tmp_path, *short)
    output = finetune(pairs, tmp_path, *short, "--skip-invalid-size-inputs-valid-test")
    assert "samples left out, longer than 12: raise --max-positions" in output


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, packed: Path):
    folder = tmp_path_factory.mktemp("hub")
    pretrain(packed, folder, "--max-update", "30", "--disable-validation")
    return RelPosRobertaModel.from_pretrained(folder, "checkpoint_last.pt", str(packed)).eval()


def test_hub_without_a_tokenizer(hub) -> None:
    """Symbols joined by spaces."""
    ids = hub.encode("w1 w2", "w3")
    symbols = [hub.dictionary[number] for number in ids.tolist()]
    assert symbols == ["<s>", "w1", "w2", "</s>", "</s>", "w3", "</s>"]
    assert hub.decode(ids) == ["w1 w2", "w3"] and hub.decode(hub.encode("w4 w5")) == "w4 w5"
    assert hub.encode_with_segments("w1 w2", "w3")[1].tolist() == [0, 0, 0, 0, 1, 1, 1]
    bert, segments = hub.encode_with_segments("w1", "w3", no_separator=True)
    assert bert.tolist().count(EOS) == 2 and segments.tolist() == [0, 0, 0, 1, 1]
    with mock.patch.object(hub.task, "cfg", OmegaConf.create({"separator_token": None})):
        assert hub.encode("w1", "w3").tolist() == bert.tolist(), "a converted BERT's task"
    assert hub.encode("nonsense").tolist() == [BOS, 3, EOS]


def test_hub_features_and_predictions(hub) -> None:
    ids = hub.encode("w1 w2 w3")
    features = hub.extract_features(ids)
    assert features.shape == (1, 5, 16)
    layers = hub.extract_features(ids, return_all_hiddens=True)
    assert len(layers) == 3 and torch.equal(layers[-1], features)
    hub.register_classification_head("new", num_classes=3)
    probabilities = hub.predict("new", ids).exp()
    torch.testing.assert_close(probabilities.sum(), torch.tensor(1.0))
    assert hub.predict("new", torch.stack([ids, ids]), return_logits=True).shape == (2, 3)
    with pytest.raises(ValueError, match="has 40 tokens and the model takes 24"):
        hub.extract_features(torch.full((40,), 5))
    with pytest.raises(ValueError, match="no head 'none'"):
        hub.predict("none", ids)


def test_hub_fills_a_mask(hub) -> None:
    """Best first, and the probabilities of the model."""
    found = hub.fill_mask("w1 <mask> w3", topk=4)
    assert len(found) == 4 and all(text.startswith("w1 ") for text, _, _ in found)
    assert [p for _, p, _ in found] == sorted((p for _, p, _ in found), reverse=True)
    ids = hub.encode("w1 w0 w3")
    ids[2] = hub.dictionary.index("<mask>")
    expected = hub.model(ids[None])[0][0, 2].softmax(0)
    best = hub.dictionary.index(found[0][2])
    assert expected[4:-1].argmax() + 4 == best  # special symbols stand before, <mask> behind
    assert expected[best].item() == pytest.approx(found[0][1], rel=1e-5)
    for wrong in ("w1 w2", "<mask> <mask>"):
        with pytest.raises(ValueError, match="give one <mask>"):
            hub.fill_mask(wrong)


def test_fill_is_the_hubs(hub, tmp_path, shell) -> None:
    """By the command, from the checkpoint's folder; a wrong line is named by its number."""
    fill = f"fill {hub.cfg.checkpoint.save_dir}/checkpoint_last.pt in.txt"
    (tmp_path / "in.txt").write_text("w1 <mask> w3\nw2 <mask>\n")
    found = shell.objects(f"{fill} --top-k 3 --jsonl --cpu")
    for line, one in zip(("w1 <mask> w3", "w2 <mask>"), found, strict=True):
        expected = hub.fill_mask(line, 3)
        assert [(f["text"], f["piece"]) for f in one["filled"]] == [(t, p) for t, _, p in expected]
        assert one["filled"][0]["probability"] == pytest.approx(expected[0][1], abs=1e-5)
    shell(f"{fill} --out out.txt")
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 10
    (tmp_path / "in.txt").write_text("w1 <mask>\nw2\n")
    assert "error: line 2: the text has no <mask>: 'w2'" in shell.refused(fill)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_hub_with_a_tokenizer(tmp_path: Path, kind: str) -> None:
    """Text in, text out, with the tokenizer that lies beside the data."""
    text = tmp_path / "train.txt"
    text.write_text("the cat sat on the mat\nthe dog sat on the cat\n" * 30)
    data = tmp_path / "bin"
    tokenizer = train_tokenizer(kind, data, files=[text], vocab_size=300)
    lines = (" ".join(tokenizer.encode(line).pieces) for line in text.read_text().splitlines())
    (tmp_path / "pieces.txt").write_text("\n".join(lines) + "\n")
    shutil.copy(data / "dict.txt", tmp_path / "dict.txt")
    files = [flag for split in ("train", "valid") for flag in (f"--{split}pref", tmp_path / "pieces.txt")]
    call("preprocess", "--only-source", "--destdir", tmp_path / "made", "--srcdict", tmp_path / "dict.txt", *files)
    shutil.copytree(tmp_path / "made", data, dirs_exist_ok=True)
    pretrain(data, tmp_path, "--max-update", "60", "--disable-validation")
    hub = RelPosRobertaModel.from_pretrained(str(tmp_path), "checkpoint_last.pt", str(data)).eval()
    ids = hub.encode("the dog sat")
    assert hub.decode(ids) == "the dog sat" and ids[0] == BOS and ids[-1] == EOS
    assert hub.encode("the", "the").tolist().count(EOS) == (2 if kind == "wordpiece" else 3)
    filled = hub.fill_mask("the cat sat on <mask> mat", topk=3)
    assert all(text.startswith("the cat sat on") for text, _, _ in filled)
    with pytest.raises(ValueError, match="lacks .* symbols of this"):
        (tmp_path / "other.txt").write_text("zebra quagga okapi\n" * 20)
        other = train_tokenizer(kind, tmp_path / "o", files=[tmp_path / "other.txt"], vocab_size=300)
        RelPosRobertaModel.from_pretrained(tmp_path, "checkpoint_last.pt", str(data), bpe=other)


@pytest.mark.slow
def test_a_fine_tuned_model_from_python(pairs: Path, tmp_path: Path) -> None:
    """Heads come with the checkpoint; a model with segments asks for them."""
    finetune(pairs, tmp_path, "--max-update", "3", "--disable-validation")
    hub = RelPosRobertaModel.from_pretrained(tmp_path, "checkpoint_last.pt", str(pairs)).eval()
    ids, segments = hub.encode_with_segments("w1 w2", "w2")
    head = "sentence_classification_head"
    assert hub.predict(head, ids, segments=segments).shape == (1, 2)
    with pytest.raises(ValueError, match="reads segments .*encode_with_segments"):
        hub.predict(head, ids)
    with pytest.raises(ValueError, match="has no <mask>"):
        hub.dictionary.indices.pop("<mask>")
        hub.fill_mask("w1 <mask>")
