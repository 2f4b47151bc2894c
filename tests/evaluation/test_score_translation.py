"""score_translation.py and average_checkpoints.py."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

from helpers import commands as cli
from helpers.scored import REFERENCE, TOKENS, generated, write_prepared
from relpos_fairseq.evaluation.comet import bootstrap
from relpos_fairseq.metrics import bleu


@pytest.fixture
def prepared(tmp_path) -> Path:
    write_prepared(tmp_path / "prepared")
    return tmp_path / "prepared"


COMET = """#!{python}
import argparse, json
parser = argparse.ArgumentParser()
for name in ("-s", "-r", "--model", "--to_json", "--gpus"):
    parser.add_argument(name)
parser.add_argument("-t", nargs="+")
for name in ("--quiet", "--only_system"):
    parser.add_argument(name, action="store_true")
given = parser.parse_args()
if given.model == "absent":
    raise KeyError("Model 'absent' not supported by COMET.")
read = lambda path: [line.strip() for line in open(path, encoding="utf-8").readlines()]
scores = {{}}
for path in given.t:
    rows = zip(read(given.s), read(path), read(given.r), strict=True)
    scores[path] = [dict(src=s, mt=m, ref=r, COMET=(len(s) + 2 * (m == r)) / 100) for s, m, r in rows]
json.dump(scores, open(given.to_json, "w"))
"""


@pytest.fixture
def comet_score(tmp_path, monkeypatch) -> None:
    """A program that is called as COMET's is and writes what it writes, by scores that are known."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "comet-score"
    program.write_text(COMET.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def told(folder: Path, name: str = "") -> dict:
    """What `--out scores.json` holds, or of it what is told of one translation."""
    found = json.loads((folder / "scores.json").read_text())
    return found[name] if name else found


def test_scores_are_sacrebleus(prepared, tmp_path, shell):
    (tmp_path / "generated.txt").write_text(generated(TOKENS))
    said = shell("score generated.txt --prepared prepared --out scores.json")
    plain = ["Das ist ein Haus.", "Ein Hund, der bellt, beißt nicht!", 'Er sagt: "Ja".', "ende."] * 5
    found, theirs = told(tmp_path, "generated.txt"), (plain, [REFERENCE])
    uncased = sacrebleu.corpus_bleu(*theirs, lowercase=True)
    scores = {"BLEU": sacrebleu.corpus_bleu(*theirs), "BLEU uncased": uncased, "chrF": sacrebleu.corpus_chrf(*theirs)}
    expected = {name: round(score.score, 2) for name, score in scores.items()}
    assert {name: value for name, (value, _) in found.items()} == expected
    assert expected["BLEU"] < expected["BLEU uncased"] < 100
    assert "case:lc" in found["BLEU uncased"][1] and "tok:13a" in said and "20 sentences" in said


@pytest.mark.parametrize("kinds", ["H", "D", "HD"])
def test_plain_lines_score_as_generated_ones(prepared, tmp_path, kinds, shell):
    results = []
    plain = ["Das ist ein Haus .", "Ein Hund , der bellt , beißt nicht !", "Er", ""] * 5
    for name, text in (("a", generated(plain, kinds)), ("b", "\n".join(plain) + "\n")):
        (tmp_path / name).write_text(text)
        shell(f"score {name} --prepared prepared --out scores.json")
        results.append(told(tmp_path, name))
    assert results[0] == results[1]


def test_sentencepiece_and_no_manifest(tmp_path, shell):
    (tmp_path / "r.de").write_text("Das Haus.\nEin Hund bellt.\n")
    (tmp_path / "s.de").write_text("▁Das ▁Ha us .\n▁Ein ▁Hund ▁bell t .\n")
    shell("score s.de --reference r.de --target-lang de --out scores.json")
    assert told(tmp_path, "s.de")["chrF"][0] == 100


def test_paired_bootstrap(prepared, tmp_path, shell):
    (tmp_path / "good").write_text(generated(TOKENS))
    worse = [line.replace("Haus", "Baum").replace("Ein", "x") for line in TOKENS]
    (tmp_path / "bad").write_text(generated(worse))
    tests = []
    for baseline in ("bad", "bad", "good"):
        line = f"score good --baseline {baseline} --prepared prepared --resamples 200 --out scores.json"
        assert "paired bootstrap, 200 resamples" in shell(line)
        tests.append(told(tmp_path, "bootstrap"))
    first, again, same = tests
    assert first["BLEU"][2] < 0.05 and "± " in first["BLEU"][0]
    assert first == again  # seeded
    assert same["BLEU"][0] == same["BLEU"][1] and same["BLEU"][2] > 0.5


# Averaging


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """Three checkpoints of one scheme and one of another."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for scheme, epochs in (("shaw", "3"), ("t5", "1")):
        options = ["--max-epoch", epochs, "--max-tokens", "4000", "--position-scheme", scheme]
        arguments = cli.train_arguments(corpus, folder / scheme, *options)
        arguments.remove("--no-epoch-checkpoints")
        cli.call("train", *arguments)
    return folder


@pytest.mark.slow
def test_average_is_the_mean_and_translates(corpus, trained, tmp_path, shell):
    assert "left out" not in shell("average <trained>/shaw --last 2 --out average.pt")
    for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt"):
        shutil.copy(trained / "shaw" / name, tmp_path)
    assert "checkpoint_last.pt is of update" in shell("average . --last 2 --out earlier.pt")
    one, two = (cli.load(trained / "shaw" / f"checkpoint{n}.pt")["model"] for n in (2, 3))
    found = cli.load(tmp_path / "average.pt")
    assert found["last_optimizer_state"] is None
    for name, value in found["model"].items():
        if torch.is_floating_point(value):
            mean = ((one[name].double() + two[name].double()) / 2).to(value.dtype)
            assert torch.equal(value, mean), name
        else:
            assert torch.equal(value, one[name]) and "scheme_version" in name
    assert cli.in_order(cli.generate(corpus, tmp_path / "average.pt"))


def test_tensors_without_options_are_averaged_beside_a_text_too(trained, tmp_path, shell):
    state = cli.load(trained / "shaw" / "checkpoint1.pt")
    torch.save({"model": state["model"]}, tmp_path / "one.pt")
    shutil.copytree(trained / "shaw" / "text", tmp_path / "text")
    shell("average one.pt one.pt --out out/mean.pt")
    assert (tmp_path / "out" / "text").is_dir()


def test_only_one_scheme_is_averaged(trained, tmp_path, shell):
    said = shell.refused("average <trained>/shaw/checkpoint1.pt <trained>/t5/checkpoint1.pt --out out.pt")
    assert "shaw" in said and "t5" in said and "only checkpoints of one scheme" in said
    assert not (tmp_path / "out.pt").exists()


def test_another_sets_output_is_refused(prepared, tmp_path, shell):
    """Two sets of as many sentences: what the output says of its set is compared, by name and by its targets."""
    other = [f"Satz Nummer {n} ." for n in range(20)]
    (prepared / "reference" / "test1.de").write_text("\n".join(other) + "\n")
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"sets": {"test": "t", "test1": "newstest2015"}}))
    system, score = tmp_path / "generated.txt", "score generated.txt --prepared prepared"
    system.write_text(generated(other).replace("Generate test with", "Generate test1 with"))
    assert "--gen-subset test1" in shell.refused(score)
    for name in ("test1", "newstest2015"):
        shell(f"{score} --split {name}")
    system.write_text(generated(other))
    said = "20 of its 20 targets (T- lines) are not the reference's sentences"
    for line in (score, "score generated.txt --reference prepared/reference/test.de --target-lang de"):
        assert said in shell.refused(line)


SENTENCES = {
    "en": "The cat sat on the mat, didn't it?",
    "cs": "Příliš žluťoučký kůň, že ano?",
    "zh": "我们今天在北京见面，好吗？",
    "zho_Hans": "我们今天在北京见面，好吗？",
    "zh_CN": "我们今天在北京见面，好吗？",
    "th": "วันนี้เราพบกันที่กรุงเทพ",
    "ru": "Сегодня мы встретимся в Москве.",
    "ar": "سنلتقي اليوم في القاهرة.",
    "ja": "今日は東京で会いましょう。",
    "ko": "오늘 서울에서 만나요.",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_a_language_is_scored_as_sacrebleu_scores_it(language, tmp_path, shell):
    """One letter in three sentences is changed; sacrebleu's own command gives the same numbers and signature."""
    trg = {"zho_Hans": "zh", "zh_CN": "zh"}.get(language, language)
    lines = [SENTENCES[language]] * 5
    system = [text[:4] + "x" + text[5:] if n < 3 else text for n, text in enumerate(lines)]
    for name, text in (("ref", lines), ("sys", system)):
        (tmp_path / name).write_text("\n".join(text) + "\n", encoding="utf-8")
    score = f"score sys --reference ref --target-lang {language} --out scores.json --ter"
    try:
        expected = sacrebleu.metrics.BLEU(trg_lang=trg)
    except (ImportError, RuntimeError):
        said = shell.refused(score)
        assert f"sacrebleu cannot cut {language} by {language}-mecab" in said
        assert f'pip install "sacrebleu[{language}]", or give --tokenize char' in said
        return
    shell(score)
    found = told(tmp_path, "sys")
    assert found["BLEU"][0] == round(expected.corpus_score(system, [lines]).score, 2)
    assert found["BLEU"][1] == expected.get_signature().format()
    assert found["TER"][0] == round(sacrebleu.metrics.TER().corpus_score(system, [lines]).score, 2)
    shell(f"{score} --tokenize char")
    assert "tok:char" in told(tmp_path, "sys")["BLEU"][1]


def test_several_references(tmp_path, shell):
    for name, lines in (("a", ["one two three four", "five six"]), ("b", ["one two 3 four", "5 six"])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    shell("score b --reference a b --target-lang en --out scores.json")
    assert told(tmp_path, "b")["BLEU uncased"][0] > 50


def test_a_tokenizer_that_cannot_be_downloaded_is_one_line(tmp_path, monkeypatch, shell):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(bleu, "BLEU", refuse)
    (tmp_path / "a").write_text("one\n")
    error = shell.refused("score a --reference a --target-lang en --tokenize flores200")
    assert "sacrebleu cannot cut en by flores200 (<urlopen error no network>)" in error


def test_comet_is_its_own_programs(prepared, comet_score, tmp_path, shell):
    source = [f"a house\r{'.' * number}" if number else "" for number in range(len(REFERENCE))]
    (prepared / "reference" / "test.en").write_bytes("".join(f"{line}\n" for line in source).encode())
    for name, lines in (("a", REFERENCE), ("b", [*REFERENCE[:-4], "Nein.", "", *REFERENCE[-2:]])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    comet = "--tokenizer none --comet Unbabel/wmt22-comet-da --resamples 200 --out scores.json"
    shell(f"score a --baseline b --prepared prepared {comet}")
    found = told(tmp_path)
    lengths = sum(len(line.replace("\r", " ").strip()) for line in source)
    for name, equal in (("a", 20), ("b", 18)):
        own = found[name]["COMET x 100"]
        assert own == [pytest.approx((lengths + 2 * equal) / 20, abs=0.005), "model:Unbabel/wmt22-comet-da|comet-score"]
    baseline, system, p = found["bootstrap"]["COMET x 100"]
    assert float(baseline.split()[0]) < float(system.split()[0]) and 0 < p < 1
    files = "--reference prepared/reference/test.de --source prepared/reference/test.en"
    said = shell(f"score a {files} --target-lang de --comet m.ckpt")
    assert f"{found['a']['COMET x 100'][0]:.2f}" in said


def test_comet_says_what_it_lacks(prepared, tmp_path, capsys, monkeypatch, request, shell):
    (tmp_path / "a").write_text("\n".join(REFERENCE) + "\n")
    score = "score a --prepared prepared --comet m"
    monkeypatch.setenv("PATH", "")
    lacks = "--comet needs the program comet-score, which is not on PATH: pip install"
    assert lacks in shell.refused(score)
    request.getfixturevalue("comet_score")
    assert "--comet needs the sentences that were translated: give --source" in shell.refused(score)
    (prepared / "reference" / "test.en").write_text("x\n" * len(REFERENCE))
    assert cli.relpos("score", "a", "--prepared", "prepared", "--comet", "absent") == 1
    assert "Model 'absent' not supported by COMET" in capsys.readouterr().err


def test_a_bootstrap_of_sentences_is_sacrebleus():
    """P and interval of COMET's bootstrap, beside sacrebleu's of a metric that is a mean of sentences."""
    drawn = np.random.default_rng(3)
    scores = np.stack([drawn.normal(50, 10, 300), drawn.normal(51, 10, 300)])
    [(mean, half), _], p = bootstrap(scores, 4000, 1)
    assert mean == pytest.approx(scores[0].mean(), abs=0.1) and half == pytest.approx(1.96 * 10 / 300**0.5, rel=0.1)
    differences = scores[1] - scores[0]
    error = differences.std() / 300**0.5
    # sacrebleu centres the absolute differences: what is left of them lies above the real one this often
    wanted = np.abs(drawn.normal(differences.mean(), error, 200_000))
    assert p == pytest.approx((wanted - wanted.mean() > abs(differences.mean())).mean(), abs=0.02)
    assert bootstrap(np.stack([scores[0], scores[0]]), 100, 1)[1] == 1.0
