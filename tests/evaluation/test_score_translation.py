"""score_translation.py and average_checkpoints.py."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch

from helpers import commands as cli
from relpos_fairseq.evaluation.comet import bootstrap
from relpos_fairseq.metrics import bleu

REFERENCE = ["Das ist ein Haus.", "Ein Hund, der bellt, beißt nicht!", "Er sagt: „Ja“.", "Ende."] * 5
TOKENS = [
    "Das ist ein Haus .",
    "Ein H@@ und , der b@@ ell@@ t , beißt nicht !",
    "Er sagt : &quot; Ja &quot; .",
    "ende .",
] * 5


def generated(lines, kinds="HD", numbers=None, seed=1) -> str:
    """What fairseq-generate prints: sentences in any order, among other lines."""
    order = list(numbers if numbers is not None else range(len(lines)))
    random.Random(seed).shuffle(order)
    out = ["2026-01-01 | INFO | loaded", "S-x"]
    for number in order:
        out += [f"S-{number}\tquelle", f"T-{number}\t{lines[number]}"]
        out += [f"{kind}-{number}\t-0.5\t{lines[number]}" for kind in kinds]
        out.append(f"P-{number}\t-0.1 -0.2")
    return "\n".join([*out, "Generate test with beam=5: BLEU4 = 1.0"]) + "\n"


@pytest.fixture
def prepared(tmp_path) -> Path:
    folder = tmp_path / "prepared"
    (folder / "reference").mkdir(parents=True)
    (folder / "reference" / "test.de").write_text("\n".join(REFERENCE) + "\n")
    settings = {"languages": ["en", "de"], "tokenizer": "moses", "bpe": "subword-nmt"}
    (folder / "manifest.json").write_text(json.dumps({"settings": settings, "sets": {"test": "t"}}))
    return folder


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


def score(*arguments) -> int:
    return cli.relpos("score", *arguments)


def test_scores_are_sacrebleus(prepared, tmp_path, capsys):
    system = tmp_path / "generated.txt"
    system.write_text(generated(TOKENS))
    assert score(system, "--prepared", prepared, "--out", tmp_path / "scores.json") == 0
    said = capsys.readouterr().out
    plain = ["Das ist ein Haus.", "Ein Hund, der bellt, beißt nicht!", 'Er sagt: "Ja".', "ende."] * 5
    found = json.loads((tmp_path / "scores.json").read_text())[str(system)]
    expected = {
        "BLEU": sacrebleu.corpus_bleu(plain, [REFERENCE]).score,
        "BLEU uncased": sacrebleu.corpus_bleu(plain, [REFERENCE], lowercase=True).score,
        "chrF": sacrebleu.corpus_chrf(plain, [REFERENCE]).score,
    }
    assert {name: value for name, (value, _) in found.items()} == {
        name: round(value, 2) for name, value in expected.items()
    }
    assert expected["BLEU"] < expected["BLEU uncased"] < 100
    assert "case:lc" in found["BLEU uncased"][1] and "tok:13a" in said and "20 sentences" in said


@pytest.mark.parametrize("kinds", ["H", "D", "HD"])
def test_plain_lines_score_as_generated_ones(prepared, tmp_path, kinds):
    results = []
    plain = ["Das ist ein Haus .", "Ein Hund , der bellt , beißt nicht !", "Er", ""] * 5
    for name, text in (("a", generated(plain, kinds)), ("b", "\n".join(plain) + "\n")):
        (tmp_path / name).write_text(text)
        assert score(tmp_path / name, "--prepared", prepared, "--out", tmp_path / "json") == 0
        results.append(list(json.loads((tmp_path / "json").read_text()).values())[0])
    assert results[0] == results[1]


def test_sentencepiece_and_no_manifest(tmp_path):
    reference, system = tmp_path / "r.de", tmp_path / "s.de"
    reference.write_text("Das Haus.\nEin Hund bellt.\n")
    system.write_text("▁Das ▁Ha us .\n▁Ein ▁Hund ▁bell t .\n")
    options = ["--reference", reference, "--target-lang", "de", "--out", tmp_path / "json"]
    assert score(system, *options) == 0
    assert json.loads((tmp_path / "json").read_text())[str(system)]["chrF"][0] == 100


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([n for n in range(20) if n not in (3, 17)], "2 are missing (3, 17)"),
        ([*range(20), 5], "1 are repeated (5)"),
        (range(21), "1 are unknown (20)"),
    ],
    ids=["missing", "repeated", "unknown"],
)
def test_every_sentence_once(prepared, tmp_path, capsys, numbers, said):
    system = tmp_path / "generated.txt"
    system.write_text(generated([*TOKENS, "mehr"], numbers=numbers))
    assert score(system, "--prepared", prepared) == 2
    assert said in capsys.readouterr().err


def test_plain_lines_must_be_as_many(prepared, tmp_path, capsys):
    system = tmp_path / "system.de"
    system.write_text("zu wenig\n")
    assert score(system, "--prepared", prepared) == 2
    assert "has 1 lines, the reference has 20" in capsys.readouterr().err
    assert score(system) == 2
    assert score(system, "--prepared", tmp_path) == 2
    assert score(system, "--prepared", prepared, "--split", "test9") == 2
    assert score(system, "--reference", system) == 2
    capsys.readouterr()
    (tmp_path / "manifest.json").write_text('{"settings": {"level": "word"}}')
    assert score(system, "--prepared", tmp_path) == 2
    assert "is not of a whole run of relpos prepare wmt" in capsys.readouterr().err
    assert score(system, "--prepared", prepared, "--resamples", "0") == 2
    assert "--resamples must be >= 1, got 0" in capsys.readouterr().err


def test_paired_bootstrap(prepared, tmp_path, capsys):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(generated(TOKENS))
    bad.write_text(generated([line.replace("Haus", "Baum").replace("Ein", "x") for line in TOKENS]))
    options = ["--prepared", prepared, "--resamples", 200, "--out", tmp_path / "json"]
    assert score(good, "--baseline", bad, *options) == 0
    first = json.loads((tmp_path / "json").read_text())["bootstrap"]
    assert first["BLEU"][2] < 0.05 and "± " in first["BLEU"][0]
    assert score(good, "--baseline", bad, *options) == 0
    assert json.loads((tmp_path / "json").read_text())["bootstrap"] == first  # seeded
    assert score(good, "--baseline", good, *options) == 0
    same = json.loads((tmp_path / "json").read_text())["bootstrap"]
    assert same["BLEU"][0] == same["BLEU"][1] and same["BLEU"][2] > 0.5
    assert "paired bootstrap, 200 resamples" in capsys.readouterr().out


# Averaging


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A corpus, and three checkpoints of one scheme and one of another."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for scheme, epochs in (("shaw", "3"), ("t5", "1")):
        options = ["--max-epoch", epochs, "--max-tokens", "4000", "--position-scheme", scheme]
        arguments = cli.train_arguments(corpus, folder / scheme, *options)
        arguments.remove("--no-epoch-checkpoints")
        cli.call("train", *arguments)
    return corpus, folder


def average(*arguments) -> int:
    return cli.relpos("average", *arguments)


@pytest.mark.slow
def test_average_is_the_mean_and_translates(trained, tmp_path, capsys):
    corpus, folder = trained
    out = tmp_path / "average.pt"
    assert average(folder / "shaw", "--last", 2, "--out", out) == 0
    assert "left out" not in capsys.readouterr().out
    for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt"):
        shutil.copy(folder / "shaw" / name, tmp_path)
    assert average(tmp_path, "--last", 2, "--out", tmp_path / "earlier.pt") == 0
    assert "checkpoint_last.pt is of update" in capsys.readouterr().out
    one, two = (cli.load(folder / "shaw" / f"checkpoint{n}.pt")["model"] for n in (2, 3))
    found = cli.load(out)
    assert found["last_optimizer_state"] is None
    for name, value in found["model"].items():
        if torch.is_floating_point(value):
            mean = ((one[name].double() + two[name].double()) / 2).to(value.dtype)
            assert torch.equal(value, mean), name
        else:
            assert torch.equal(value, one[name]) and "scheme_version" in name
    assert cli.in_order(cli.generate(corpus, out))


def test_tensors_without_options_are_averaged_beside_a_text_too(trained, tmp_path):
    _, folder = trained
    state = cli.load(folder / "shaw" / "checkpoint1.pt")
    torch.save({"model": state["model"]}, tmp_path / "one.pt")
    shutil.copytree(folder / "shaw" / "text", tmp_path / "text")
    assert average(tmp_path / "one.pt", tmp_path / "one.pt", "--out", tmp_path / "out" / "mean.pt") == 0
    assert (tmp_path / "out" / "text").is_dir()


def test_only_one_scheme_is_averaged(trained, tmp_path, capsys):
    _, folder = trained
    paths = [folder / "shaw" / "checkpoint1.pt", folder / "t5" / "checkpoint1.pt"]
    assert average(*paths, "--out", tmp_path / "out.pt") == 2
    said = capsys.readouterr().err
    assert "shaw" in said and "t5" in said and "only checkpoints of one scheme" in said
    assert not (tmp_path / "out.pt").exists()


def test_absent_inputs_are_named(tmp_path, capsys):
    for more in ((), ("--last", "2"), ("--last-updates", "2")):
        absent = tmp_path / "nowhere"
        assert cli.relpos("average", absent, *more, "--out", tmp_path / "o") == 2
        assert f"checkpoints {absent} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        (
            "1 2 _last",
            ("--last-updates", 3),
            "0 checkpoints like checkpoint_2_5000.pt, 3 asked for; its files are checkpoint1.pt, checkpoint2.pt, "
            "checkpoint_last.pt: give --last 2, name the checkpoints one by one, or train with "
            "--save-interval-updates and --keep-interval-updates",
        ),
        (
            "_1_9",
            ("--last", 2),
            "checkpoint7.pt, 2 asked for; its files are checkpoint_1_9.pt: give --last-updates 1, ",
        ),
        ("1-a 2-a", ("--last", 2), "its files are checkpoint1-a.pt, checkpoint2-a.pt: name the checkpoints one by one"),
        ("1-a 2-a 3-a 4-a 5-a 6-a 7-a", ("--last", 2), "checkpoint6-a.pt and 1 more: name"),
        ("", ("--last", 2), "its files are none: name"),
    ],
)
def test_too_few_checkpoints_of_a_kind(there, asked, said, tmp_path, capsys):
    """What is there, another suffix (--checkpoint-suffix) or the other kind, is what the error speaks of."""
    for name in there.split():
        (tmp_path / f"checkpoint{name}.pt").touch()
    assert average(tmp_path, *asked, "--out", tmp_path / "out.pt") == 2
    assert said in capsys.readouterr().err


def test_bad_checkpoints_are_one_error(trained, tmp_path, capsys):
    _, folder = trained
    broken = tmp_path / "broken.pt"
    broken.write_bytes((folder / "t5" / "checkpoint1.pt").read_bytes()[:1000])
    out = ["--out", tmp_path / "out.pt"]
    for inputs, said in (
        ([broken], "is truncated"),
        ([tmp_path / "none.pt"], "does not exist"),
        ([folder / "shaw"], "add --last N"),
        ([folder / "shaw", "--last", 9], "has 3 checkpoints"),
        ([folder / "shaw", "--last-updates", 1], "has 0 checkpoints"),
    ):
        assert average(*inputs, *out) == 2
        assert said in capsys.readouterr().err


def test_another_sets_output_is_refused(prepared, tmp_path, capsys):
    """Two sets of as many sentences: what the output says of its set is compared, by name and by its targets."""
    other = [f"Satz Nummer {n} ." for n in range(20)]
    (prepared / "reference" / "test1.de").write_text("\n".join(other) + "\n")
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps(manifest | {"sets": {"test": "t", "test1": "newstest2015"}}))
    system = tmp_path / "generated.txt"
    system.write_text(generated(other).replace("Generate test with", "Generate test1 with"))
    assert score(system, "--prepared", prepared) == 2
    assert "--gen-subset test1" in capsys.readouterr().err
    for name in ("test1", "newstest2015"):
        assert score(system, "--prepared", prepared, "--split", name) == 0
    system.write_text(generated(other))
    assert score(system, "--prepared", prepared) == 2
    assert "20 of its 20 targets (T- lines) are not the reference's sentences" in capsys.readouterr().err
    assert score(system, "--reference", prepared / "reference" / "test.de", "--target-lang", "de") == 2


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
def test_a_language_is_scored_as_sacrebleu_scores_it(language, tmp_path, capsys):
    """One letter in three sentences is changed; sacrebleu's own command gives the same numbers and signature."""
    trg = {"zho_Hans": "zh", "zh_CN": "zh"}.get(language, language)
    lines = [SENTENCES[language]] * 5
    system = [text[:4] + "x" + text[5:] if n < 3 else text for n, text in enumerate(lines)]
    for name, text in (("ref", lines), ("sys", system)):
        (tmp_path / name).write_text("\n".join(text) + "\n", encoding="utf-8")
    given = ["--reference", tmp_path / "ref", "--target-lang", language, "--out", tmp_path / "json", "--ter"]
    try:
        expected = sacrebleu.metrics.BLEU(trg_lang=trg)
    except (ImportError, RuntimeError):
        assert score(tmp_path / "sys", *given) == 2
        said = capsys.readouterr().err
        assert f"sacrebleu cannot cut {language} by {language}-mecab" in said
        assert f'pip install "sacrebleu[{language}]", or give --tokenize char' in said
        return
    assert score(tmp_path / "sys", *given) == 0
    found = json.loads((tmp_path / "json").read_text())[str(tmp_path / "sys")]
    assert found["BLEU"][0] == round(expected.corpus_score(system, [lines]).score, 2)
    assert found["BLEU"][1] == expected.get_signature().format()
    assert found["TER"][0] == round(sacrebleu.metrics.TER().corpus_score(system, [lines]).score, 2)
    assert score(tmp_path / "sys", *given, "--tokenize", "char") == 0
    found = json.loads((tmp_path / "json").read_text())[str(tmp_path / "sys")]
    assert "tok:char" in found["BLEU"][1]
    assert score(tmp_path / "sys", *given, "--tokenize", "words") == 2


def test_several_references(tmp_path):
    for name, lines in (("a", ["one two three four", "five six"]), ("b", ["one two 3 four", "5 six"]), ("c", ["x"])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    given = ["--target-lang", "en", "--out", tmp_path / "json"]
    assert score(tmp_path / "b", "--reference", tmp_path / "a", tmp_path / "b", *given) == 0
    assert json.loads((tmp_path / "json").read_text())[str(tmp_path / "b")]["BLEU uncased"][0] > 50
    assert score(tmp_path / "b", "--reference", tmp_path / "a", tmp_path / "c", *given) == 2


def test_a_tokenizer_that_cannot_be_downloaded_is_one_line(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(bleu, "BLEU", refuse)
    (tmp_path / "a").write_text("one\n")
    given = ["--reference", tmp_path / "a", "--target-lang", "en", "--tokenize", "flores200"]
    assert score(tmp_path / "a", *given) == 2
    assert "sacrebleu cannot cut en by flores200 (<urlopen error no network>)" in capsys.readouterr().err


def test_comet_is_its_own_programs(prepared, comet_score, tmp_path, capsys):
    source = [f"a house\r{'.' * number}" if number else "" for number in range(len(REFERENCE))]
    (prepared / "reference" / "test.en").write_bytes("".join(f"{line}\n" for line in source).encode())
    for name, lines in (("a", REFERENCE), ("b", [*REFERENCE[:-4], "Nein.", "", *REFERENCE[-2:]])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    of = ("--prepared", prepared, "--tokenizer", "none", "--comet", "Unbabel/wmt22-comet-da", "--resamples", "200")
    assert score(tmp_path / "a", "--baseline", tmp_path / "b", *of, "--out", tmp_path / "scores.json") == 0
    told = json.loads((tmp_path / "scores.json").read_text())
    lengths = sum(len(line.replace("\r", " ").strip()) for line in source)
    for name, equal in (("a", 20), ("b", 18)):
        own = told[str(tmp_path / name)]["COMET x 100"]
        assert own == [pytest.approx((lengths + 2 * equal) / 20, abs=0.005), "model:Unbabel/wmt22-comet-da|comet-score"]
    baseline, system, p = told["bootstrap"]["COMET x 100"]
    assert float(baseline.split()[0]) < float(system.split()[0]) and 0 < p < 1
    plain = ("--reference", prepared / "reference" / "test.de", "--target-lang", "de", "--source")
    assert score(tmp_path / "a", *plain, prepared / "reference" / "test.en", "--comet", "m.ckpt") == 0
    assert f"{told[str(tmp_path / 'a')]['COMET x 100'][0]:.2f}" in capsys.readouterr().out


def test_comet_says_what_it_lacks(prepared, tmp_path, capsys, monkeypatch, request):
    (tmp_path / "a").write_text("\n".join(REFERENCE) + "\n")
    monkeypatch.setenv("PATH", "")
    assert score(tmp_path / "a", "--prepared", prepared, "--comet", "m") == 2
    assert "--comet needs the program comet-score, which is not on PATH: pip install" in capsys.readouterr().err
    request.getfixturevalue("comet_score")
    assert score(tmp_path / "a", "--prepared", prepared, "--comet", "m") == 2
    assert "--comet needs the sentences that were translated: give --source" in capsys.readouterr().err
    (prepared / "reference" / "test.en").write_text("x\n" * len(REFERENCE))
    assert score(tmp_path / "a", "--prepared", prepared, "--comet", "absent") == 1
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
