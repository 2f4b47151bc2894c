"""Question answering by fairseq's commands and our scripts, on small data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.commands import QUIET, ROOT, USER_DIR, call, captured, load, relpos, value
from helpers.folders import contents
from helpers.questions import COLOURS, PLACES, THINGS, make_data, make_file
from relpos_fairseq.evaluation import questions
from relpos_fairseq.io.stages import locked

MODEL = [
    *("--arch", "relpos_roberta_tiny", "--position-scheme", "m4", "--segment-encoding", "head"),
    *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32"),
    *("--encoder-attention-heads", "2", "--dropout", "0", "--attention-dropout", "0"),
]
TASK = [
    *("--task", "question_answering", "--criterion", "question_answering"),
    *("--tokens-per-sample", "40", "--doc-stride", "8", "--max-query-length", "12"),
]
TRAIN = [
    *("--optimizer", "relpos_adam", "--adam-betas", "(0.9, 0.98)", "--lr", "3e-3"),
    *("--clip-norm", "1", "--batch-size", "16", "--log-interval", "1", "--no-epoch-checkpoints"),
    *("--distributed-world-size", "1", "--seed", "1"),
    *("--user-dir", str(USER_DIR), *QUIET),
]

CLIP = ("--position-clip-distance", "4")


def train(data: Path, save_dir: Path, *more: object) -> str:
    return call("train", data, *MODEL, *TASK, *TRAIN, "--save-dir", save_dir, *map(str, more))


def validate(data: Path, path: Path, *more: object) -> str:
    batch = [] if "--max-tokens" in more else ["--batch-size", "5"]
    common = ["--task", "question_answering", "--user-dir", USER_DIR, "--path", path, *QUIET]
    return call("validate", data, *common, *batch, *map(str, more))


def script(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; its exit status and all that it printed."""
    with captured() as stream:
        status = relpos(*arguments)
    return status, stream.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = make_data(tmp_path_factory.mktemp("qa") / "data", unanswerable=True)
    make_file(folder / "few.json", 5, 4)
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("trained")
    output = train(data, save_dir, "--max-epoch", 3)
    return save_dir / "checkpoint_last.pt", output


def numbers(output: str, subset: str) -> dict[str, float]:
    """What fairseq-validate logged of a subset."""
    line = [one for one in output.splitlines() if f"valid on '{subset}' subset | loss" in one][-1]
    pairs = [part.split() for part in line.split("subset | ")[1].split(" | ")]
    return {name: float(number) for name, number in pairs}


def test_training_reports_scores(trained):
    path, output = trained
    assert "120 questions" in output and "some unanswerable" in output
    for name in ("em", "f1", "has_f1", "no_em", "tuned_f1", "tuned_f1_thresh"):
        assert value(output, name) is not None
    keys = load(path)["model"]
    assert "span_heads.question_answering.out_proj.weight" in keys


def test_scores_do_not_depend_on_batches(data, trained):
    """Also several subsets in one command, with and without unanswerable questions."""
    path, output = trained
    found = [
        validate(data, path, "--valid-subset", "valid,few"),
        validate(data, path, "--valid-subset", "few,valid", "--max-tokens", "60"),
    ]
    for subset in ("valid", "few"):
        first, second = (numbers(one, subset) for one in found)
        for name in ("loss", "em", "f1"):
            assert first[name] == pytest.approx(second[name], abs=2e-3)
    assert "no_em" in numbers(found[0], "valid") and "no_em" not in numbers(found[0], "few")
    assert numbers(found[0], "valid")["f1"] == pytest.approx(value(output, "f1"), abs=1e-3)


def test_answers_are_those_of_the_evaluation(data, trained, tmp_path, capsys):
    """`relpos answer` on one context is `evaluate qa` on its questions; text/ is enough."""
    path, _ = trained
    assert script("evaluate", "qa", data / "few.json", "--checkpoint", path, "--out", tmp_path)[0] == 0
    expected = json.loads((tmp_path / "predictions.json").read_text())
    [paragraph, *_] = json.loads((data / "few.json").read_text())["data"][0]["paragraphs"]
    asked = [entry["question"] for entry in paragraph["qas"]]
    moved = tmp_path / "moved"
    shutil.copytree(path.parent, moved)
    capsys.readouterr()
    assert relpos("answer", moved / path.name, paragraph["context"], *asked, "--cpu") == 0
    found = capsys.readouterr().out.splitlines()
    assert found == [expected[entry["id"]] for entry in paragraph["qas"]]
    (tmp_path / "context.txt").write_text(paragraph["context"])
    (tmp_path / "asked.txt").write_text(f"{asked[0]}\n")
    files = (tmp_path / "context.txt", "--file", tmp_path / "asked.txt")
    assert relpos("answer", moved / path.name, *files, "--nbest", "2", "--jsonl") == 0
    [one] = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["answers"][0]["text"] == found[0] and len(one["answers"]) == 2
    for wrong, said in ((("absent.txt", "Who?"), "one word is no context"), (("a b",), "give a QUESTION")):
        assert relpos("answer", moved / path.name, *wrong) == 2
        assert said in capsys.readouterr().err


def test_scripts_agree_with_validation(data, trained, tmp_path):
    path, _ = trained
    logged = numbers(validate(data, path), "valid")
    out = tmp_path / "out"
    common = ("--checkpoint", path, "--data", data, "--cpu", "--max-tokens", "700")
    status, printed = script("evaluate", "qa", data / "valid.json", *common, "--out", out)
    assert status == 0, printed
    found = json.loads((out / "results.json").read_text())["valid"]
    pairs = {
        "em": "exact",
        "f1": "f1",
        "has_em": "HasAns_exact",
        "no_f1": "NoAns_f1",
        "tuned_em": "best_exact",
        "tuned_f1": "best_f1",
        "tuned_f1_thresh": "reached_f1_thresh",
    }
    for name, ours in pairs.items():
        assert found[ours] == pytest.approx(logged[name], abs=1e-3), name
    predictions = json.loads((out / "predictions.json").read_text())
    odds = json.loads((out / "null_odds.json").read_text())
    n_best = json.loads((out / "nbest.json").read_text())
    assert predictions.keys() == odds.keys() == n_best.keys() and len(predictions) == 39
    for name, answers in n_best.items():
        assert sum(one["probability"] for one in answers) == pytest.approx(1)
        assert (predictions[name] == "") == (odds[name] > 0)
    official = ("--predictions", out / "predictions.json", "--out", tmp_path / "official")
    status, printed = script("evaluate", "qa", data / "valid.json", *official)
    again = json.loads((tmp_path / "official" / "results.json").read_text())["valid.json"]
    assert all(again[key] == pytest.approx(found[key]) for key in again)
    # At the best threshold the score is the best one.
    threshold = found["reached_f1_thresh"]
    more = (f"--null-threshold={threshold}", "--out", tmp_path / "tuned")
    status, printed = script("evaluate", "qa", data / "valid.json", *common, *more)
    tuned = json.loads((tmp_path / "tuned" / "results.json").read_text())["valid"]
    assert tuned["f1"] == pytest.approx(found["best_f1"])


def test_several_files_make_a_table(data, trained, tmp_path):
    path, _ = trained
    tydi = tmp_path / "tydi.json"
    tydi.write_text(
        (data / "few.json")
        .read_text()
        .replace('"id": "0-', '"id": "finnish-0-')
        .replace('"id": "1-', '"id": "korean-1-')
    )
    status, printed = script(
        "evaluate",
        "qa",
        data / "valid.json",
        data / "few.json",
        tydi,
        "--checkpoint",
        path,
        "--data",
        data,
        "--cpu",
        "--out",
        tmp_path,
    )
    assert "| tydi fi" in printed and "| tydi ko" in printed
    assert status == 0 and "| mean" in printed
    assert (tmp_path / "few" / "predictions.json").is_file()
    assert not (tmp_path / "few" / "null_odds.json").exists()
    assert "" not in json.loads((tmp_path / "few" / "predictions.json").read_text()).values()


def test_an_interrupted_evaluation_goes_on(data, trained, tmp_path, monkeypatch):
    """What is answered is not computed again; other options start over; the files are equal."""
    asked = (data / "valid.json", data / "few.json", "--checkpoint", trained[0], "--data", data, "--cpu")
    asked += ("--max-tokens", "100")
    assert script("evaluate", "qa", *asked, "--out", tmp_path / "whole")[0] == 0
    whole, span_logits, calls = contents(tmp_path / "whole"), questions.span_logits, []

    def stops(after: int):
        def logits(*arguments):
            if len(calls) == after:
                raise KeyboardInterrupt
            calls.append(arguments)
            return span_logits(*arguments)

        calls.clear()
        monkeypatch.setattr(questions, "span_logits", logits)

    out = ("--out", tmp_path / "out")
    stops(10**6)
    assert script("evaluate", "qa", *asked, "--out", tmp_path / "counted")[0] == 0
    total = len(calls)
    assert total > 9
    for after, more in ((4, ()), (total - 5, ("--n-best", "3")), (4, ()), (total - 5, ())):
        stops(after)
        status, printed = script("evaluate", "qa", *asked, *out, *more)
        assert status == 130 and "run the same command again to continue" in printed
        assert not (tmp_path / "out" / "results.json").exists()
    with locked(tmp_path / "out", wait=False):
        status, printed = script("evaluate", "qa", *asked, *out)
    assert status == 2 and f"error: another process works in {tmp_path / 'out'}: wait for it" in printed
    kept = next((tmp_path / "out").glob(".partial-answers-few*"))
    kept.write_bytes(kept.read_bytes()[:-3])  # a kill may cut a line: that batch is answered again
    stops(2)
    status, printed = script("evaluate", "qa", *asked, *out)
    assert status == 0 and len(calls) == 2 and "batches are answered already" in printed
    assert contents(tmp_path / "out") == whole


def test_a_file_name_with_a_space_counts_in_the_mean(capsys):
    one = {"total": 2, "exact": 50.0, "f1": 60.0}
    found = {"my file": one, "other": {**one, "f1": 80.0}, "other de": {**one, "f1": 0.0}}
    questions.print_results(found, {"my file", "other"})
    assert "70.00" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_resumes_bit_equal(data, tmp_path):
    more = ["--update-epoch-batch-itr", "True", "--disable-validation"]
    train(data, tmp_path / "whole", "--max-epoch", 2, *more)
    train(data, tmp_path / "parts", "--max-epoch", 1, *more)
    train(data, tmp_path / "parts", "--max-epoch", 2, *more)
    whole, parts = (load(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "parts"))
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, parts["model"][name]), name


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory):
    """Checkpoints of fairseq's masked_lm task by scheme, two updates at 24 tokens."""
    from relpos_fairseq.text import load_tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = load_tokenizer(data)
    lines = ["The red cat is in Paris today.", "Where is the dog?"] * 10
    text = "".join(" ".join(tokenizer.encode(line).pieces) + "\n" for line in lines)
    (folder / "text").write_text(text)
    call(
        "preprocess",
        "--only-source",
        "--srcdict",
        data / "dict.txt",
        "--workers",
        "1",
        "--trainpref",
        folder / "text",
        "--validpref",
        folder / "text",
        "--destdir",
        folder / "bin",
    )
    sizes = ["--tokens-per-sample", "24", "--max-update", "2"]
    for scheme, more in {"m4": CLIP, "learned": []}.items():
        call(
            "train",
            folder / "bin",
            *MODEL,
            "--task",
            "masked_lm",
            "--criterion",
            "masked_lm",
            *TRAIN,
            *sizes,
            "--position-scheme",
            scheme,
            *more,
            "--save-dir",
            folder / scheme,
        )
    return {name: folder / name / "checkpoint_last.pt" for name in ("m4", "learned")}


@pytest.mark.slow
def test_fine_tunes_what_masked_lm_trained(data, pretrained, tmp_path):
    """The head is new, all else comes from the checkpoint; longer input than in pre-training."""
    fine = ("--finetune-from-model", pretrained["m4"], *CLIP, "--lr", "0")
    train(data, tmp_path, *fine, "--max-update", 1, "--disable-validation")
    before = load(pretrained["m4"])["model"]
    tuned = load(tmp_path / "checkpoint_last.pt")["model"]
    assert {key for key in tuned if key not in before} == {
        "span_heads.question_answering.out_proj.weight",
        "span_heads.question_answering.out_proj.bias",
    }
    assert all(torch.equal(before[key], tuned[key]) for key in before)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--max-positions", "24")])
def test_learned_positions_say_what_to_do_about_longer_input(data, pretrained, tmp_path, more):
    fine = ("--finetune-from-model", pretrained["learned"], "--position-scheme", "learned")
    with pytest.raises(Exception, match="--max-positions|relative scheme") as caught:
        train(data, tmp_path, *fine, "--max-update", 1, *more)
    assert "24" in str(caught.value) and "40" in str(caught.value)


@pytest.mark.slow
def test_learns_its_training_set(tmp_path):
    """The whole path: what is trained on is answered, byte-level BPE, windows that overlap."""
    data = make_data(tmp_path / "data", kind="bpe")
    make_file(data / "train.json", 4, 7)
    make_file(data / "again.json", 4, 7)
    output = train(
        data,
        tmp_path / "model",
        "--max-epoch",
        150,
        "--valid-subset",
        "again",
        "--validate-interval",
        50,
        "--save-interval",
        50,
    )
    assert value(output, "em") == 100 and value(output, "f1") == 100


def converted_bert(folder: Path, cls: str, positions: int):
    """A random BERT, saved as `bert` and converted as `ours`."""
    transformers = pytest.importorskip("transformers")
    source = folder / "bert"
    words = ["the", "is", "in", "today", ".", "where", "?", *COLOURS, *THINGS]
    pieces = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    pieces += [name.lower() for name in PLACES]
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=positions,
        position_embedding_type="relative_key_query",
    )
    model = getattr(transformers, cls)(config).eval()
    model.save_pretrained(source)
    (source / "vocab.txt").write_text("\n".join(pieces) + "\n")
    status, printed = script("convert", source, "--to", "same", "--out", folder / "ours")
    assert status == 0, printed
    return model


@torch.no_grad()
def test_a_converted_model_answers_as_it_did(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = converted_bert(tmp_path, "BertForQuestionAnswering", 128)
    path = make_file(tmp_path / "questions.json", 3, 1)
    converted = tmp_path / "ours" / "model.pt"
    status, printed = script("evaluate", "qa", path, "--checkpoint", converted, "--out", tmp_path / "out")
    assert status == 0, printed
    found = json.loads((tmp_path / "out" / "nbest.json").read_text())
    shutil.copy(path, tmp_path / "ours" / "valid.json")
    results = json.loads((tmp_path / "out" / "results.json").read_text())["questions"]
    printed = validate(tmp_path / "ours", converted)
    assert value(printed, "f1") == pytest.approx(results["f1"], abs=1e-3)
    tokenizer = transformers.BertTokenizerFast.from_pretrained(tmp_path / "bert")
    for article in json.loads(path.read_text())["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                inputs = tokenizer(asked["question"], paragraph["context"], return_tensors="pt")
                logits, best = model(**inputs), found[asked["id"]][0]
                context = torch.tensor([part == 1 for part in inputs.sequence_ids(0)])
                spans = logits.start_logits[0, context][:, None] + logits.end_logits[0, context]
                score = best["start_logit"] + best["end_logit"]
                assert score == pytest.approx(spans.triu().tril(29).max().item(), abs=1e-5)


def test_a_converted_bert_is_fine_tuned(tmp_path):
    converted_bert(tmp_path, "BertForMaskedLM", 48)
    for name, seed in (("train", 1), ("valid", 2)):
        make_file(tmp_path / f"{name}.json", 8, seed)
    status, printed = script(
        "prepare",
        "qa",
        "--train",
        tmp_path / "train.json",
        "--valid",
        tmp_path / "valid.json",
        "--tokenizer-folder",
        tmp_path / "ours",
        "--out",
        tmp_path / "data",
    )
    assert status == 0, printed
    size = ["--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32"]
    output = call(
        "train",
        tmp_path / "data",
        *TASK,
        *TRAIN,
        "--arch",
        "relpos_roberta_tiny",
        *size,
        "--encoder-attention-heads",
        "2",
        "--position-scheme",
        "m4",
        "--segment-encoding",
        "input",
        "--layer-norm-eps",
        "1e-12",
        "--max-positions",
        "48",
        "--max-update",
        "2",
        "--finetune-from-model",
        tmp_path / "ours" / "model.pt",
        "--save-dir",
        tmp_path / "out",
    )
    assert "wordpiece tokenizer" in output and value(output, "f1") >= 0
    task = load(tmp_path / "out" / "checkpoint_last.pt")["cfg"]["task"]
    assert task["_name"] == "question_answering"


def test_a_conversion_keeps_the_options_of_its_task(data, tmp_path):
    given = ("--doc-stride", "10", "--null-threshold", "1.5", "--max-answer-length", "7")
    train(data, tmp_path, "--max-update", 1, *given)
    path, out = tmp_path / "checkpoint_last.pt", tmp_path / "out"
    arguments = (path, "--data", data, "--to", "learned+m4", "--init", "own", "--approximate")
    status, printed = script("convert", *arguments, "--out", out)
    assert status == 0, printed
    before, after = (load(one)["cfg"]["task"] for one in (path, out / "model.pt"))
    assert after == before | {"data": "."}
    names = ("doc_stride", "null_threshold", "max_answer_length")
    assert [after[name] for name in names] == [10, 1.5, 7]
    asked = (data / "few.json", "--checkpoint", out / "model.pt", "--out", tmp_path / "answers", "--cpu")
    status, printed = script("evaluate", "qa", *asked)
    assert status == 0, printed


def test_mlqa_needs_a_language(data, trained):
    path, _ = trained
    with pytest.raises(ValueError, match="does not name its language: give --language"):
        validate(data, path, "--metric", "mlqa")
    output = validate(data, path, "--metric", "mlqa", "--language", "en")
    assert "em" in numbers(output, "valid")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--valid-subset", "absent"), "no split 'absent': expected .*absent.json"),
        (("--n-best", "0"), "--n-best must be 1 or more"),
        (("--max-query-length", "2"), "questions longer than --max-query-length 2"),
        (("--tokenizer-folder", "/nowhere"), "no tokenizer folder /nowhere"),
        (
            ("--segment-encoding", "head", "--num-segments", "1"),
            "--num-segments 1: question and context are 2 segments: give --num-segments 2",
        ),
    ],
)
def test_wrong_options(data, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        train(data, tmp_path, "--max-update", 1, *more)


def test_needs_a_model_with_a_span_head(data, tmp_path):
    small = ("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--encoder-layers", "1")
    arguments = ("--arch", "roberta_base", *small, "--encoder-attention-heads", "2")
    with pytest.raises(ValueError, match="needs an --arch relpos_roberta"):
        call("train", data, *TASK, *TRAIN, *arguments, "--save-dir", tmp_path)


def test_wrong_data_folder(tmp_path):
    with pytest.raises(ValueError, match="relpos prepare qa makes one"):
        train(tmp_path, tmp_path, "--max-update", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["q.json"], "give either --checkpoint FILE or --predictions"),
        (["q.json", "--checkpoint", "p"], "give --out"),
        (
            ["q.json", "--checkpoint", "absent.pt", "--out", "o"],
            "--checkpoint absent.pt does not exist: give a file that does",
        ),
        (["q.json", "q.json", "--predictions", "p"], "belongs to one file"),
        (["q.json", "--predictions", "p", "--n-best", "2"], "--n-best needs --checkpoint"),
        (["q.json", "--predictions", "p", "--na-prob-thresh", "0"], "needs --null-odds"),
        (["q.json", "--checkpoint", "p", "--null-odds", "p"], "--null-odds needs --predictions"),
        (["q.json", "--checkpoint", "p", "--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
        (["x.json", "--predictions", "p"], "files x.json does not exist: give a file that does"),
        (["q.json", "--predictions", "n.json"], "n.json is not the JSON that is expected (0-0 is [{"),
        (["q.json", "--predictions", "a.json", "--null-odds", "o.json"], "o.json lacks 1 of the ids of a.json: 0-1"),
    ],
)
def test_evaluate_says_what_is_wrong(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_file(tmp_path / "q.json", 1, 1, unanswerable=True)
    (tmp_path / "p").touch()
    written = {"n": {"0-0": [{"text": "x"}]}, "a": {"0-0": "x", "0-1": ""}, "o": {"0-0": 0.5}}
    for name, content in written.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    status, printed = script("evaluate", "qa", *arguments)
    assert status == 2 and printed.splitlines()[-1].startswith("error: ") and message in printed


def test_prepare(tmp_path):
    for name, seed in (("squad.en.json", 1), ("squad.de.json", 2)):
        make_file(tmp_path / name, 6, seed)
    arguments = ("--train", tmp_path / "squad.en.json", "--train-articles", 4)
    more = ("--eval", tmp_path / "squad.de.json", "--train-tokenizer", "bpe", "--vocab-size", 300)
    for out in ("a", "b"):
        status, printed = script("prepare", "qa", *arguments, *more, "--out", tmp_path / out)
        assert status == 0, printed
    names = {path.name for path in (tmp_path / "a").iterdir() if path.is_file()}
    assert names == {"train.json", "valid.json", "squad.de.json", "tokenizer.json", "dict.txt", "manifest.json"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert [manifest["splits"][name]["articles"] for name in ("train", "valid", "squad.de")] == [4, 2, 2]
    status, printed = script(
        "prepare",
        "qa",
        "--train",
        tmp_path / "squad.en.json",
        "--valid",
        tmp_path / "squad.de.json",
        "--tokenizer-folder",
        tmp_path / "a",
        "--out",
        tmp_path / "c",
    )
    assert status == 0, printed
    assert (tmp_path / "c" / "dict.txt").read_bytes() == (tmp_path / "a" / "dict.txt").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-articles", "2"], "--tokenizer-folder FOLDER or --train-tokenizer"),
        (["--train-tokenizer", "bpe"], "--valid FILES or --train-articles"),
        (["--train-tokenizer", "bpe", "--train-articles", "6"], "leaves none of the 6 articles"),
        (["--train-tokenizer", "bpe", "--train-articles", "0"], "--train-articles must be >= 1"),
        (["--tokenizer-folder", "pieces", "--train-articles", "2"], "no pieces/dict.txt"),
        (["--tokenizer-folder", "pieces", "--vocab-size", "9"], "--vocab-size needs --train-tokenizer"),
        (["--train-tokenizer", "bpe", "--train-articles", "2", "--eval", "short.json"], "short.json has 3 articles"),
        (["--train-tokenizer", "bpe", "--valid", "broken.json"], "broken.json is not SQuAD's format (data is 1,"),
        (
            ["--train-tokenizer", "bpe", "--train-articles", "2", "--out", "pieces"],
            "--out pieces holds another tokenizer's sentencepiece.model",
        ),
    ],
)
def test_prepare_says_what_is_wrong(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_file(tmp_path / "train.json", 6, 1)
    make_file(tmp_path / "short.json", 3, 1)
    (tmp_path / "broken.json").write_text('{"data": 1}')
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "sentencepiece.model").write_bytes(b"")
    status, printed = script("prepare", "qa", "--train", "train.json", "--out", "out", *arguments)
    assert status == 2 and printed.splitlines()[-1].startswith("error: ") and message in printed


@pytest.mark.parametrize("recipe", ["squad", "squad_v2", "xquad_tiny"])
def test_recipes_say_how_they_are_launched(recipe):
    text = (ROOT / "examples" / "roberta" / "config" / f"{recipe}.yaml").read_text()
    assert f"--config-name {recipe} " in text.split("\nhydra:")[0]
    assert f"save_dir: checkpoints/{recipe} " in text
