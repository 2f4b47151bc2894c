"""BLEU during training is sacrebleu's for the target's language."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU

from helpers import FULL, wmt_text
from helpers import commands as cli
from helpers.folders import prepare
from relpos_fairseq.io.errors import UserError

PIECES = "我们 今天 在北京 见面， 好吗？ 明天 下雨， 他说： “不去”。 haus, straße. 3.5%".split()
BEAM = ("--eval-bleu-args", '{"beam": 1, "max_len_b": 12}')
DETOKENISE = ("--eval-bleu", *BEAM, "--eval-bleu-remove-bpe", "sentencepiece")


def corpus_of(folder: Path, language: str) -> cli.Corpus:
    """Sentences of a few words, and the same in pieces of another language; pieces are joined without spaces."""
    raw, draw = folder / "raw", random.Random(1)
    raw.mkdir()
    for split, count in (("train", 200), ("valid", 23)):
        chosen = [draw.choices(range(len(PIECES)), k=draw.randint(4, 8)) for _ in range(count)]
        for side, lines in (
            ("en", [" ".join(f"w{n}" for n in sentence) for sentence in chosen]),
            (language, ["▁" + " ".join(PIECES[n] for n in sentence) for sentence in chosen]),
        ):
            (raw / f"{split}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    cli.binarise(raw, folder / "bin", languages=("en", language))
    return cli.Corpus(raw, folder / "bin")


@pytest.mark.parametrize(
    ("language", "tokenize"),
    [("zho_Hans", "zh"), ("de", "13a"), *([("zh", "zh"), ("yue", "zh"), ("qaa", "13a")] if FULL else [])],
)
def test_text_is_cut_by_the_targets_language(language: str, tokenize: str, tmp_path: Path) -> None:
    """What training logs is sacrebleu's BLEU of the translations that fairseq-generate gives, to the last digit."""
    corpus = corpus_of(tmp_path, language)
    said = cli.train(corpus, tmp_path / "out", *DETOKENISE, "--position-scheme", "m4", "--max-update", "40")
    given = [str(corpus.binary), "--user-dir", str(cli.USER_DIR), "--path", str(tmp_path / "out/checkpoint_last.pt")]
    given += [*cli.QUIET, "--gen-subset", "valid", "--beam", "1", "--max-len-b", "12", "--max-tokens", "400"]
    system = cli.in_order(cli.call("generate", *given, "--post-process", "sentencepiece"))
    references = [line.replace(" ", "").lstrip("▁") for line in corpus.lines("valid", language)]
    scores = {name: BLEU(tokenize=name).corpus_score(system, [references]).score for name in ("13a", "zh")}
    assert cli.value(said, "bleu") == round(scores[tokenize], 2) > 0
    assert round(scores["13a"], 2) != round(scores["zh"], 2)  # so that the test tells one from the other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "more"),
    {
        "sentencepiece": "sentencepiece",
        "subword-nmt": """--eval-bleu-detok moses --eval-bleu-detok-args '{"target_lang": "de"}'""",
    }.items(),
)
def test_data_of_prepare_wmt_are_scored_as_relpos_score_does(units: str, more: str, tmp_path: Path, shell) -> None:
    """With the flags that examples/translation/README.md names, where normalisation leaves the references alone."""
    text, out = wmt_text.write_texts(tmp_path / "text"), tmp_path / "out"
    given = ["--out", out, "--vocab-size", "90", "--workers", "1", "--bpe", units]
    prepare("wmt", ["en-de", "--from-dir", text, *given])
    corpus, search = cli.Corpus(text, out / "data-bin"), ["--gen-subset", "valid", "--beam", "1", "--max-len-b", "30"]
    beam = ["--eval-bleu-args", '{"beam": 1, "max_len_b": 30}', "--validate-interval", "99"]
    flags = ["--eval-bleu", *beam, "--eval-bleu-remove-bpe", *shlex.split(more)]
    said = cli.train(corpus, tmp_path / "model", *flags, "--max-update", "150" if FULL else "90")
    paths = [str(corpus.binary), "--user-dir", str(cli.USER_DIR), "--path", tmp_path / "model" / "checkpoint_last.pt"]
    (tmp_path / "said").write_text(cli.call("generate", *paths, *cli.QUIET, *search))
    shell("score said --prepared out --split valid --out json")
    (found,) = json.loads((tmp_path / "json").read_text()).values()
    assert cli.value(said, "bleu") == found["BLEU"][0] > 0


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_a_tokenizer_that_is_not_installed_is_said_before_training(language, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(f"sacrebleu.tokenizers.tokenizer_{language}_mecab.MeCab", None)
    corpus = corpus_of(tmp_path, language)
    with pytest.raises(UserError) as error:
        cli.train(corpus, tmp_path / "out", *DETOKENISE, "--max-update", "2")
    assert f"sacrebleu cannot cut {language} by {language}-mecab" in str(error.value)
    assert f'pip install "sacrebleu[{language}]", or give --eval-tokenized-bleu' in str(error.value)
    assert not list((tmp_path / "out").glob("*.pt"))
    said = cli.train(corpus, tmp_path / "out", *DETOKENISE, "--eval-tokenized-bleu", "--max-update", "2")
    assert cli.value(said, "bleu") >= 0
