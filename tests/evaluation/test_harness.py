"""Texts scored for the lm-evaluation-harness: as `relpos evaluate lm`, and as one forward pass."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.lm_models import randomized, small_lm, small_xl
from helpers.models import small_task
from relpos_fairseq.evaluation import harness
from relpos_fairseq.evaluation.language_model import load_subject
from relpos_fairseq.evaluation.perplexity import Reading
from relpos_fairseq.inference.checkpoints.causal_lm import Scorer, open_model
from relpos_fairseq.text.assets import SymbolText


def stream_of(checkpoint):
    """The validation set as `evaluate lm` reads it, after </s>; and the same as a text."""
    subject = load_subject(checkpoint, checkpoint.parent.parent / "moved", "valid")
    words = subject.model.decoder.dictionary
    trained = open_model(checkpoint, None, True)
    text = trained.source.decode(words[int(number)] for number in subject.tokens)
    tokens = np.array([words.eos(), *subject.tokens])
    return trained, replace(subject, tokens=tokens), text


@pytest.mark.parametrize("mem_len", [None, 0, 25])
def test_a_text_has_the_score_of_evaluate_lm(characters, mem_len):
    trained, subject, text = stream_of(characters)
    _, score = Reading(mem_len, rows=1).score(subject, range(1, len(subject.tokens)))
    scorer = Scorer(trained, mem_len)
    [(found, greedy)] = scorer.score([scorer.pair("", text)])
    assert score.tokens > 5 * trained.cfg.task.tokens_per_sample and not greedy
    assert found == pytest.approx(-score.nats, rel=1e-7)
    ids, first = scorer.pair(text[:41], text[41:60])
    assert first == 42 and len(ids) == 61
    [(found, _)] = scorer.score([(ids, first)])
    assert found == pytest.approx(-score.each[41:60].sum(), rel=1e-6)


def scorer_of(model, segment, **lengths) -> Scorer:
    """A scorer of a small model, whose symbols are joined by spaces."""
    cfg = SimpleNamespace(task=SimpleNamespace(tokens_per_sample=segment))
    task, cpu = small_task(), torch.device("cpu")
    return Scorer(SimpleNamespace(model=model, cfg=cfg, task=task, device=cpu, source=SymbolText()), **lengths)


@pytest.mark.parametrize("kind", ["memory", "window"])
def test_ends_of_texts_against_a_pass_each(kind):
    """Texts of all lengths together, shorter and longer than a segment, in any order."""
    if kind == "memory":
        model = randomized(small_xl(position_scheme="transformer_xl", mem_len=60))
        scorer = scorer_of(model, 6, rows=3)
    else:
        model = randomized(small_lm(position_scheme="m4"))
        scorer = scorer_of(model, 6, context=9, rows=3)
    generator, texts, expected = torch.Generator().manual_seed(2), [], []
    for length, first in ((3, 1), (20, 4), (1, 1), (10, 10), (7, 7), (10, 3), (5, 5), (24, 23)):
        ids = [2, *torch.randint(4, 24, (length - 1,), generator=generator).tolist()]
        likeliest = length == 10 and first == 3
        total, greedy = 0.0, True
        for place in range(first, length):
            step = (place - first) // 4 * 4 + first  # windows of 9 move on by 4
            end = min(step + 4, length)
            begin = 0 if kind == "memory" or length <= 10 else max(0, end - 1 - 9)
            scores = model(torch.tensor([ids[begin:place]]))[0][0, -1].log_softmax(-1)
            if likeliest:
                ids[place] = int(scores.argmax())
            total += float(scores[ids[place]])
            greedy = greedy and ids[place] == int(scores.argmax())
        assert greedy == (likeliest or first == length)
        texts.append((ids, first))
        expected.append((pytest.approx(total, abs=2e-5), greedy))
    assert scorer.score(texts) == expected
    assert scorer.score(texts[:1]) == expected[:1] and scorer.score([]) == []


def test_symbols_over_the_border_are_scored():
    scorer = scorer_of(small_lm(position_scheme="m4"), 6)
    words = scorer.words
    ids, first = scorer.pair("w1 w2", " w3")
    assert ([words[n] for n in ids], first) == (["</s>", "w1", "w2", "w3"], 3)
    assert scorer.pair("w1 w", "2")[1] == 2  # w2 is one symbol
    assert scorer.pair("", "w1")[1] == 1
    with pytest.raises(ValueError, match="mem_len must be >= 0, got -1"):
        scorer_of(small_xl(position_scheme="m4"), 6, mem_len=-1)


def test_without_the_harness_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match=r"pip install 'relpos_fairseq\[lm-eval\]'"):
        harness.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "symbols"),
    [
        ({"until": [""]}, 256),
        ({"until": ""}, 256),
        ({"until": None, "max_gen_toks": 5}, 5),
        ({"until": ["", "zzz"], "max_new_tokens": 7}, 7),
        ({"max_tokens": "6"}, 6),
        ({"max_completion_tokens": 6.0}, 6),
        ({"max_gen_toks": 4, "max_tokens": 6}, 4),
        ({"max_length": 25}, 5),
        ({"max_length": 20}, 0),
        ({"max_length": 3, "max_gen_toks": 9}, 0),
        ({"temperature": 0.0, "max_gen_toks": 3}, 3),
        ({"do_sample": False, "temperature": 0.9, "max_gen_toks": 3}, 3),
    ],
)
def test_options_of_generation_are_the_harness_own(characters, options, symbols):
    """Limits and stops, as its models of transformers take them; what is drawn is the likeliest."""
    pytest.importorskip("lm_eval", reason="an extra of 400 MB: relpos_fairseq[lm-eval]")
    from relpos_fairseq.evaluation.harness_model import RelPosLM

    model = RelPosLM(str(characters), device="cpu")
    _, _, text = stream_of(characters)
    [found] = model.generate_until([SimpleNamespace(args=(text[:20], options))])
    [wanted] = model.generate_until([SimpleNamespace(args=(text[:20], {"max_gen_toks": 256, "until": []}))])
    assert found == wanted[: len(found)] and len(found) == symbols
    end = wanted[2:4]
    [cut] = model.generate_until([SimpleNamespace(args=(text[:20], {"until": ["", end, None]}))])
    assert cut == wanted[: wanted.index(end)]
    for until in ({"a": 1}, [1], [["a"]], 5):
        with pytest.raises(ValueError, match="generation_kwargs until: a text or a list of texts"):
            model.generate_until([SimpleNamespace(args=("a", {"until": until}))])
    empty = {"max_length": None, "top_k": None, "seed": None, "do_sample": True, "max_gen_toks": 2}
    assert len(model.generate_until([SimpleNamespace(args=("a", empty))])[0]) == 2
    with pytest.raises(ValueError, match=r"generation_kwargs num_beams: relpos knows .*max_new_tokens"):
        model.generate_until([SimpleNamespace(args=("a", {"num_beams": 4}))])


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
doc_to_target: "{target}"
target_delimiter: ""
{more}
"""


@pytest.mark.slow
def test_the_harness_runs_a_local_task(characters, tmp_path, monkeypatch, capsys):
    """Its numbers are ours: bits of a text, the likelier ending, and a drawn one."""
    pytest.importorskip("lm_eval", reason="an extra of 400 MB: relpos_fairseq[lm-eval]")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    trained, subject, text = stream_of(characters)
    document = {"context": text[:30], "whole": text, "end": text[30:36], "other": "_____"}
    (tmp_path / "data.json").write_text(json.dumps(document) + "\n")
    choices = 'doc_to_choice: "{{[end, other]}}"'
    until = 'generation_kwargs: {until: ["\\n"], max_gen_toks: 9}'
    perplexity = "metric_list: [{metric: byte_perplexity}]"
    for name, kind, target, more in (
        ("rolling", "loglikelihood_rolling", "{{whole}}", perplexity),
        ("choice", "multiple_choice", "0", choices),
        ("draw", "generate_until", "{{end}}", f"{until}\nmetric_list: [{{metric: exact_match}}]"),
    ):
        task = TASK.format(name=name, file=tmp_path / "data.json", kind=kind, target=target, more=more)
        (tmp_path / f"{name}.yaml").write_text(task)
    out = tmp_path / "out"
    where = f"--model_args checkpoint={characters} --include_path {tmp_path} --output_path {out}"
    how = "--model relpos --tasks rolling,choice,draw --log_samples --device cpu"
    monkeypatch.setattr(sys, "argv", ["relpos-lm-eval", *f"{where} {how}".split()])
    harness.main()
    [results] = out.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    _, score = Reading(rows=1).score(subject, range(1, len(subject.tokens)))
    bits = math.log2(found["rolling"]["byte_perplexity,none"])
    assert bits == pytest.approx(score.nats / len(text) / math.log(2), rel=1e-6)
    choice, (drawn, *_) = (
        json.loads(next(out.rglob(f"samples_{name}_*.jsonl")).read_text())["resps"][0] for name in ("choice", "draw")
    )
    assert float(choice[0][0]) == pytest.approx(-score.each[30:36].sum(), rel=1e-5)
    scorer = Scorer(trained)
    assert "\n" not in drawn and len(drawn) <= 9
    [(_, greedy)] = scorer.score([scorer.pair(text[:30], drawn if len(drawn) == 9 else drawn + "\n")])
    assert greedy
