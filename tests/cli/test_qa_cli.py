"""Question answering by fairseq's commands and our scripts, on small data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers.commands import QUIET, USER_DIR, assert_same_state, call, captured, load, relpos, value
from helpers.folders import contents
from helpers.questions import COLOURS, MODEL, PLACES, THINGS, TRAIN, make_data, make_file, training
from relpos_fairseq.evaluation import questions
from relpos_fairseq.io.stages import locked
from relpos_fairseq.text import load_tokenizer

CLIP = ("--position-clip-distance", "4")


def train(data: Path, save_dir: Path, *more: object) -> str:
    return call("train", *training(data, save_dir, *more))


def validate(data: Path, path: Path, *more: object) -> str:
    batch = [] if "--max-tokens" in more else ["--batch-size", "5"]
    common = ["--task", "question_answering", "--user-dir", USER_DIR, "--path", path, *QUIET]
    return call("validate", data, *common, *batch, *map(str, more))


@pytest.fixture(scope="module")
def log(squad, tmp_path_factory) -> tuple[Path, str]:
    """A checkpoint, and what its training said."""
    save_dir = tmp_path_factory.mktemp("trained")
    return save_dir / "checkpoint_last.pt", train(squad, save_dir, "--max-epoch", 3)


@pytest.fixture(scope="module")
def trained(log) -> Path:
    return log[0]


def numbers(output: str, subset: str) -> dict[str, float]:
    """What fairseq-validate logged of a subset."""
    line = [one for one in output.splitlines() if f"valid on '{subset}' subset | loss" in one][-1]
    pairs = [part.split() for part in line.split("subset | ")[1].split(" | ")]
    return {name: float(number) for name, number in pairs}


def test_training_reports_scores(log):
    path, output = log
    assert "120 questions" in output and "some unanswerable" in output
    for name in ("em", "f1", "has_f1", "no_em", "tuned_f1", "tuned_f1_thresh"):
        assert value(output, name) is not None
    assert "span_heads.question_answering.out_proj.weight" in load(path)["model"]


def test_scores_do_not_depend_on_batches(squad, log):
    """Also several subsets in one command, with and without unanswerable questions."""
    path, output = log
    ways = (("valid,few",), ("few,valid", "--max-tokens", "60"))
    found = [validate(squad, path, "--valid-subset", *way) for way in ways]
    for subset in ("valid", "few"):
        first, second = (numbers(one, subset) for one in found)
        for name in ("loss", "em", "f1"):
            assert first[name] == pytest.approx(second[name], abs=2e-3)
    assert "no_em" in numbers(found[0], "valid") and "no_em" not in numbers(found[0], "few")
    assert numbers(found[0], "valid")["f1"] == pytest.approx(value(output, "f1"), abs=1e-3)


def test_answers_are_those_of_the_evaluation(squad, trained, tmp_path, shell):
    """`relpos answer` on one context is `evaluate qa` on its questions; text/ is enough."""
    shell("evaluate qa <squad>/few.json --checkpoint <trained> --out .")
    expected = json.loads((tmp_path / "predictions.json").read_text())
    [paragraph, *_] = json.loads((squad / "few.json").read_text())["data"][0]["paragraphs"]
    asked = [entry["question"] for entry in paragraph["qas"]]
    shutil.copytree(trained.parent, tmp_path / "moved")
    answer = f"answer moved/{trained.name}"
    found = shell(f"{answer} --cpu", paragraph["context"], *asked).splitlines()
    assert found == [expected[entry["id"]] for entry in paragraph["qas"]]
    (tmp_path / "context.txt").write_text(paragraph["context"])
    (tmp_path / "asked.txt").write_text(f"{asked[0]}\n")
    [one] = shell.objects(f"{answer} context.txt --file asked.txt --nbest 2 --jsonl")
    assert one["answers"][0]["text"] == found[0] and len(one["answers"]) == 2
    assert "one word is no context" in shell.refused(f"{answer} absent.txt Who?")
    assert "give a QUESTION" in shell.refused(f"{answer} 'a b'")


def test_scripts_agree_with_validation(squad, trained, tmp_path, shell):
    logged = numbers(validate(squad, trained), "valid")
    evaluate = "evaluate qa <squad>/valid.json --checkpoint <trained> --data <squad> --cpu --max-tokens 700"
    shell(f"{evaluate} --out out")
    told = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    found = told["results"]["valid"]
    pairs = {"em": "exact", "f1": "f1", "has_em": "HasAns_exact", "no_f1": "NoAns_f1", "tuned_em": "best_exact"}
    pairs |= {"tuned_f1": "best_f1", "tuned_f1_thresh": "reached_f1_thresh"}
    for name, ours in pairs.items():
        assert found[ours] == pytest.approx(logged[name], abs=1e-3), name
    predictions, odds, n_best = told["predictions"], told["null_odds"], told["nbest"]
    assert predictions.keys() == odds.keys() == n_best.keys() and len(predictions) == 39
    for name, answers in n_best.items():
        assert sum(one["probability"] for one in answers) == pytest.approx(1)
        assert (predictions[name] == "") == (odds[name] > 0)
    shell("evaluate qa <squad>/valid.json --predictions out/predictions.json --out official")
    again = json.loads((tmp_path / "official" / "results.json").read_text())["valid.json"]
    assert all(again[key] == pytest.approx(found[key]) for key in again)
    # At the best threshold the score is the best one.
    shell(f"{evaluate} --null-threshold={found['reached_f1_thresh']} --out tuned")
    tuned = json.loads((tmp_path / "tuned" / "results.json").read_text())["valid"]
    assert tuned["f1"] == pytest.approx(found["best_f1"])


def test_several_files_make_a_table(squad, trained, tmp_path, shell):
    few = (squad / "few.json").read_text()
    (tmp_path / "tydi.json").write_text(few.replace('"id": "0-', '"id": "finnish-0-').replace('"1-', '"korean-1-'))
    files = "<squad>/valid.json <squad>/few.json tydi.json"
    printed = shell(f"evaluate qa {files} --checkpoint <trained> --data <squad> --cpu --out .")
    assert "| tydi fi" in printed and "| tydi ko" in printed and "| mean" in printed
    assert (tmp_path / "few" / "predictions.json").is_file()
    assert not (tmp_path / "few" / "null_odds.json").exists()
    assert "" not in json.loads((tmp_path / "few" / "predictions.json").read_text()).values()


def script(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; its exit status and all that it printed and logged."""
    with captured() as stream:
        status = relpos(*arguments)
    return status, stream.getvalue()


def test_an_interrupted_evaluation_goes_on(squad, trained, tmp_path, monkeypatch):
    """What is answered is not computed again; other options start over; the files are equal."""
    asked = (squad / "valid.json", squad / "few.json", "--checkpoint", trained, "--data", squad, "--cpu")
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
def test_resumes_bit_equal(squad, tmp_path):
    more = ["--update-epoch-batch-itr", "True", "--disable-validation"]
    train(squad, tmp_path / "whole", "--max-epoch", 2, *more)
    for epochs in (1, 2):
        train(squad, tmp_path / "parts", "--max-epoch", epochs, *more)
    assert_same_state(*(tmp_path / name / "checkpoint_last.pt" for name in ("whole", "parts")))


@pytest.fixture(scope="module")
def pretrained(squad, tmp_path_factory):
    """Checkpoints of fairseq's masked_lm task by scheme, two updates at 24 tokens."""
    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = load_tokenizer(squad)
    lines = ["The red cat is in Paris today.", "Where is the dog?"] * 10
    text = "".join(" ".join(tokenizer.encode(line).pieces) + "\n" for line in lines)
    (folder / "text").write_text(text)
    files = ("--srcdict", squad / "dict.txt", "--trainpref", folder / "text", "--validpref", folder / "text")
    call("preprocess", "--only-source", "--workers", "1", *files, "--destdir", folder / "bin")
    more = [*TRAIN, *"--task masked_lm --criterion masked_lm --tokens-per-sample 24 --max-update 2".split()]
    for scheme, clip in {"m4": CLIP, "learned": []}.items():
        flags = [*MODEL, *more, "--position-scheme", scheme, *clip]
        call("train", folder / "bin", *flags, "--save-dir", folder / scheme)
    return {name: folder / name / "checkpoint_last.pt" for name in ("m4", "learned")}


@pytest.mark.slow
def test_fine_tunes_what_masked_lm_trained(squad, pretrained, tmp_path):
    """The head is new, all else comes from the checkpoint; longer input than in pre-training."""
    fine = ("--finetune-from-model", pretrained["m4"], *CLIP, "--lr", "0")
    train(squad, tmp_path, *fine, "--max-update", 1, "--disable-validation")
    before = load(pretrained["m4"])["model"]
    tuned = load(tmp_path / "checkpoint_last.pt")["model"]
    head = "span_heads.question_answering.out_proj"
    assert tuned.keys() - before.keys() == {f"{head}.weight", f"{head}.bias"}
    assert all(torch.equal(before[key], tuned[key]) for key in before)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--max-positions", "24")])
def test_learned_positions_say_what_to_do_about_longer_input(squad, pretrained, tmp_path, more):
    fine = ("--finetune-from-model", pretrained["learned"], "--position-scheme", "learned")
    with pytest.raises(Exception, match="--max-positions|relative scheme") as caught:
        train(squad, tmp_path, *fine, "--max-update", 1, *more)
    assert "24" in str(caught.value) and "40" in str(caught.value)


@pytest.mark.nightly
@pytest.mark.slow
def test_learns_its_training_set(tmp_path):
    """The whole path: what is trained on is answered, byte-level BPE, windows that overlap."""
    data = make_data(tmp_path / "data", kind="bpe")
    make_file(data / "train.json", 4, 7)
    make_file(data / "again.json", 4, 7)
    each = "--max-epoch 150 --valid-subset again --validate-interval 50 --save-interval 50".split()
    output = train(data, tmp_path / "model", *each)
    assert value(output, "em") == 100 and value(output, "f1") == 100


def converted_bert(shell, folder: Path, cls: str, positions: int):
    """A random BERT, saved as `bert` and converted as `ours`."""
    transformers = pytest.importorskip("transformers")
    words = ["the", "is", "in", "today", ".", "where", "?", *COLOURS, *THINGS]
    pieces = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    pieces += [name.lower() for name in PLACES]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": len(pieces), "max_position_embeddings": positions}
    config = transformers.BertConfig(**sizes, position_embedding_type="relative_key_query")
    model = getattr(transformers, cls)(config).eval()
    model.save_pretrained(folder / "bert")
    (folder / "bert" / "vocab.txt").write_text("\n".join(pieces) + "\n")
    shell("convert bert --to same --out ours")
    return model


@torch.no_grad()
def test_a_converted_model_answers_as_it_did(tmp_path, shell):
    transformers = pytest.importorskip("transformers")
    model = converted_bert(shell, tmp_path, "BertForQuestionAnswering", 128)
    path = make_file(tmp_path / "questions.json", 3, 1)
    shell("evaluate qa questions.json --checkpoint ours/model.pt --out out")
    found = json.loads((tmp_path / "out" / "nbest.json").read_text())
    shutil.copy(path, tmp_path / "ours" / "valid.json")
    results = json.loads((tmp_path / "out" / "results.json").read_text())["questions"]
    printed = validate(tmp_path / "ours", tmp_path / "ours" / "model.pt")
    assert value(printed, "f1") == pytest.approx(results["f1"], abs=1e-3)
    tokenizer = transformers.BertTokenizerFast.from_pretrained(tmp_path / "bert")
    paragraphs = [one for article in json.loads(path.read_text())["data"] for one in article["paragraphs"]]
    for text, asked in ((one["context"], asked) for one in paragraphs for asked in one["qas"]):
        inputs = tokenizer(asked["question"], text, return_tensors="pt")
        logits, best = model(**inputs), found[asked["id"]][0]
        context = torch.tensor([part == 1 for part in inputs.sequence_ids(0)])
        spans = logits.start_logits[0, context][:, None] + logits.end_logits[0, context]
        score = best["start_logit"] + best["end_logit"]
        assert score == pytest.approx(spans.triu().tril(29).max().item(), abs=1e-5)


def test_a_converted_bert_is_fine_tuned(tmp_path, shell):
    converted_bert(shell, tmp_path, "BertForMaskedLM", 48)
    for name, seed in (("train", 1), ("valid", 2)):
        make_file(tmp_path / f"{name}.json", 8, seed)
    shell("prepare qa --train train.json --valid valid.json --tokenizer-folder ours --out data")
    model = "--segment-encoding input --layer-norm-eps 1e-12 --max-positions 48 --max-update 2"
    start = ("--finetune-from-model", tmp_path / "ours" / "model.pt")
    output = train(tmp_path / "data", tmp_path / "out", *model.split(), *start)
    assert "wordpiece tokenizer" in output and value(output, "f1") >= 0
    task = load(tmp_path / "out" / "checkpoint_last.pt")["cfg"]["task"]
    assert task["_name"] == "question_answering"


def test_a_conversion_keeps_the_options_of_its_task(squad, tmp_path, shell):
    given = "--doc-stride 10 --null-threshold 1.5 --max-answer-length 7"
    train(squad, tmp_path, "--max-update", 1, *given.split())
    shell("convert checkpoint_last.pt --data <squad> --to learned+m4 --init own --approximate --out out")
    before, after = (load(tmp_path / name)["cfg"]["task"] for name in ("checkpoint_last.pt", "out/model.pt"))
    assert after == before | {"data": "."}
    names = ("doc_stride", "null_threshold", "max_answer_length")
    assert [after[name] for name in names] == [10, 1.5, 7]
    shell("evaluate qa <squad>/few.json --checkpoint out/model.pt --out answers --cpu")


def test_mlqa_needs_a_language(squad, trained):
    with pytest.raises(ValueError, match="does not name its language: give --language"):
        validate(squad, trained, "--metric", "mlqa")
    output = validate(squad, trained, "--metric", "mlqa", "--language", "en")
    assert "em" in numbers(output, "valid")


def test_wrong_data_folder(tmp_path):
    with pytest.raises(ValueError, match="relpos prepare qa makes one"):
        train(tmp_path, tmp_path, "--max-update", 1)


def test_prepare(tmp_path, shell):
    for name, seed in (("squad.en.json", 1), ("squad.de.json", 2)):
        make_file(tmp_path / name, 6, seed)
    tokenizer = "--train-tokenizer bpe --vocab-size 300"
    for out in ("a", "b"):
        shell(f"prepare qa --train squad.en.json --train-articles 4 --eval squad.de.json {tokenizer} --out {out}")
    names = {path.name for path in (tmp_path / "a").iterdir() if path.is_file()}
    assert names == {"train.json", "valid.json", "squad.de.json", "tokenizer.json", "dict.txt", "manifest.json"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert [manifest["splits"][name]["articles"] for name in ("train", "valid", "squad.de")] == [4, 2, 2]
    shell("prepare qa --train squad.en.json --valid squad.de.json --tokenizer-folder a --out c")
    assert (tmp_path / "c" / "dict.txt").read_bytes() == (tmp_path / "a" / "dict.txt").read_bytes()
