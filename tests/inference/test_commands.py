"""`relpos translate` and `sample`, and the hub: raw text, from the checkpoint's folder alone."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from helpers import FULL
from helpers.commands import QUIET, USER_DIR, call, command, relpos
from helpers.commands import train as train_translation
from helpers.lm_models import randomized, small_lm, small_xl
from helpers.models import small_task
from helpers.tokenizers import lines as odd_lines
from helpers.wmt_text import write_texts
from relpos_fairseq.core import placement
from relpos_fairseq.inference.checkpoints import causal_lm, hooks
from relpos_fairseq.inference.checkpoints.hooks import FolderText
from relpos_fairseq.inference.commands import open_translator
from relpos_fairseq.inference.model_card import write_export_card
from relpos_fairseq.inference.translator import Batching, Hypothesis, Search, batches, translate
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.nn.packed import PackedLinear, QuantizedLinear
from relpos_fairseq.text.assets import SymbolText


@pytest.fixture(scope="module")
def translation(tmp_path_factory, prepare_wmt):
    """(checkpoint, raw text, fairseq-generate's output), after the data is gone."""
    folder = tmp_path_factory.mktemp("translation")
    raw = write_texts(folder / "raw")
    prepare_wmt(raw, folder / "data")
    data = folder / "data" / "data-bin"
    train_translation(SimpleNamespace(binary=data), folder / "checkpoints", "--max-update", "60")
    checkpoint = folder / "checkpoints" / "checkpoint_last.pt"
    options = ["--beam", "3", "--nbest", "2", "--max-len-b", "20", "--batch-size", "2", *QUIET]
    generated = call("generate", data, "--path", checkpoint, *options)
    (folder / "data").rename(folder / "moved")
    return checkpoint, raw, generated


@pytest.fixture(scope="module")
def checkpoint(translation) -> Path:
    return translation[0]


@pytest.fixture
def hub(checkpoint) -> TransformerModel:
    """By fairseq's own class, without naming data or units."""
    return TransformerModel.from_pretrained(str(checkpoint.parent), checkpoint.name)


@pytest.fixture(scope="module")
def raw(translation) -> Path:
    return translation[1]


def test_translations_are_fairseqs(translation) -> None:
    """The same symbols and scores, whatever stands beside a sentence in its batch."""
    checkpoint, raw, generated = translation
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", generated, re.MULTILINE)
    wanted = [[one for one in found if int(one[0]) == n] for n in range(9)]
    translator = open_translator(checkpoint, None, True)
    encoded = [translator.source.encode(line) for line in (raw / "test.en").read_text().splitlines()]
    search = Search(beam=3, nbest=2, max_len_b=20)
    for row, hypotheses in zip(wanted, translator.translate(encoded, search), strict=True):
        assert [text for _, _, text in row] == [" ".join(one.symbols) for one in hypotheses]
        for (_, score, _), one in zip(row, hypotheses, strict=True):
            assert one.score == pytest.approx(float(score) * 0.6931472, abs=2e-4)


def test_interactive_takes_raw_text(checkpoint, raw, tmp_path, shell) -> None:
    """fairseq-interactive with `--bpe relpos` gives the texts of `relpos translate`, also of text like its symbols."""
    text = tmp_path / "in.txt"
    text.write_text("".join((raw / "test.en").read_text().splitlines(True)[:4]) + "a </s> b@@ c\n")
    where = [checkpoint.parent / "text", "--path", checkpoint, "--bpe", "relpos", "--input", text]
    where += ["--tokenizer-folder", checkpoint.parent / "text", "--source-lang", "en", "--target-lang", "de"]
    said = call("interactive", *where, "--beam", "3", "--max-len-b", "20", *QUIET)
    found = [line.split("\t")[2] for line in said.splitlines() if line.startswith("D-")]
    assert found == shell("translate <checkpoint> in.txt --beam 3 --max-len-b 20 --cpu").splitlines()


def interactive(checkpoint: Path, text: str, *more: str, fails: bool = False) -> str:
    """What fairseq-interactive prints of a text from standard input."""
    where = ("--path", checkpoint, "--user-dir", USER_DIR, "--bpe", "relpos", "--cpu")
    where += ("--tokenizer-folder", checkpoint.parent / "text", "--source-lang", "en", "--target-lang", "de")
    more = ("--beam", "2", "--max-len-b", "9", *more)
    return command("fairseq-interactive", checkpoint.parent / "text", *where, *more, stdin=text, fails=fails)


@pytest.mark.slow
def test_interactive_reads_lines_as_they_are(checkpoint) -> None:
    """A lone CR ends no line, an empty line has no words, and long ones are cut where that is asked for."""
    text = "a\rb\r\n\n" + "a " * 50 + "\n"
    for more in (("--buffer-size", "3", "--batch-size", "3"), ())[: 2 if FULL else 1]:
        limits = ("--truncate-source", "--max-source-positions", "7", "--nbest", "2")
        said = interactive(checkpoint, text, *limits, *more).splitlines()
        sources = [line.split("\t")[1] for line in said if re.match(r"S-\d+\t", line)]
        assert len(sources) == 3 and not sources[1] and len(sources[2].split()) == 6
        assert [line for line in said if line.startswith("H-1")] == ["H-1\t0.0\t"] * 2
        assert [line for line in said if line.startswith(("D-1", "P-1"))] == ["D-1\t0.0\t", "P-1\t0.0000"] * 2
        assert sum(line.startswith("D-2") and bool(line.split("\t")[2]) for line in said) == 2


@pytest.mark.slow
def test_interactive_numbers_the_line_that_is_too_long(checkpoint) -> None:
    text = "a\nb\n" + "a " * 50 + "\n"
    limits = {
        "--max-source-positions": "Size of sample #0 is invalid .*; --truncate-source cuts such lines",
        "--max-tokens": "sample #0 has 51 tokens, and a batch --max-tokens 7: raise it",
    }
    for limit, said in list(limits.items())[: 2 if FULL else 1]:
        last = interactive(checkpoint, text, limit, "7", fails=True).strip().splitlines()[-1]
        assert re.fullmatch(f"ValueError: line 3 of the input: {said}", last)


def test_options_have_types_of_which_fairseq_makes_flags() -> None:
    """A field's type is no text, as `from __future__ import annotations` makes it of a registered dataclass."""
    registered = [one for registry in REGISTRIES.values() for one in registry["dataclass_registry"].values()]
    registered += [*TASK_DATACLASS_REGISTRY.values(), *MODEL_DATACLASS_REGISTRY.values()]
    ours = [one for one in registered if one is not None and "relpos" in repr(one).lower()]
    assert len(ours) > 5
    texts = [(one.__name__, field.name) for one in ours for field in fields(one) if isinstance(field.type, str)]
    assert texts == []


def test_integers_translate_nearly_the_same(checkpoint, raw, shell) -> None:
    """Every linear layer in int8, by the flag; and packed without one."""
    plain = open_translator(checkpoint, None, True)
    assert any(isinstance(part, PackedLinear) for part in plain.trained.model.modules())
    integers = open_translator(checkpoint, None, True, "int8")
    kinds = {type(part) for part in integers.trained.model.modules()}
    assert QuantizedLinear in kinds and not kinds & {PackedLinear, torch.nn.Linear}
    encoded = [plain.source.encode(line) for line in (raw / "test.en").read_text().splitlines()]
    search = Search(beam=3, max_len_b=20)
    pairs = zip(plain.translate(encoded, search), integers.translate(encoded, search), strict=True)
    apart = [abs(one[0].score - other[0].score) for one, other in pairs]
    assert median(apart) < 0.05  # where a search goes another way, one may end and the other be cut off
    found = shell("translate <checkpoint> <raw>/test.en --max-len-b 20 --quantization int8 --cpu").splitlines()
    assert len(found) == len(encoded)


def test_lines_keep_their_order(raw, monkeypatch, tmp_path, shell) -> None:
    """Empty lines too, through buffers smaller than the text, from standard input and a file."""
    lines = ["", *(raw / "test.en").read_text().splitlines(), "", "a tree"]
    options = "--beam 2 --max-len-b 20 --cpu"
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    whole = shell(f"translate <checkpoint> in.txt {options}").splitlines()
    assert len(whole) == 12 and whole[0] == whole[10] == "" and all(whole[1:10])
    objects = shell.objects(f"translate <checkpoint> in.txt {options} --buffer 5 --max-tokens 30 --jsonl")
    assert [one["hypotheses"][0]["text"] for one in objects] == whole
    assert [(one["line"], one["source"]) for one in objects] == list(enumerate(lines, start=1))
    typed = SimpleNamespace(buffer=io.BytesIO("\ufeffa tree\r\n\nthe dog".encode()), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", typed)
    scored = shell(f"translate <checkpoint> {options} --nbest 2").splitlines()
    cells = [line.split("\t") for line in scored]
    assert [cell[0] for cell in cells] == ["1", "1", "2", "2", "3", "3"]
    assert cells[0][2] == whole[11] and float(cells[0][1]) >= float(cells[1][1])


def test_batches_hold_every_sentence_once() -> None:
    lengths = [3, 0, 9, 1, 4, 9, 2, 30]
    for max_tokens, most in ((20, 9), (1, 9), (100, 2)):
        found = list(batches(lengths, Batching(max_tokens, most)))
        assert sorted(number for batch in found for number in batch) == [0, 2, 3, 4, 5, 6, 7]
        for batch in found:
            widest = 1 + max(lengths[number] for number in batch)
            assert len(batch) == 1 or (len(batch) * widest <= max_tokens and len(batch) <= most)


def test_a_reader_that_leaves_ends_the_command(checkpoint, raw, monkeypatch, tmp_path, capsys) -> None:
    """`relpos translate ... | head -1`: no traceback, and the status of SIGPIPE."""

    def print_nothing(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", print_nothing)
    with (tmp_path / "out").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert relpos("translate", checkpoint, raw / "test.en", "--beam", "1") == 141
    assert "Traceback" not in capsys.readouterr().err


def test_the_hub_translates_as_the_command(hub, raw, tmp_path, shell) -> None:
    """Odd lines and blank ones, alone and together; an empty text has no translation that could be invented."""
    lines = [*(raw / "test.en").read_text().splitlines()[:2], "", "  ", *(one for one in odd_lines() if len(one) < 60)]
    (tmp_path / "in.txt").write_bytes("".join(f"{line}\n" for line in lines).encode())
    shell("translate <checkpoint> in.txt --out out.txt --beam 2 --max-len-b 6 --cpu")
    wanted = (tmp_path / "out.txt").read_bytes().decode().split("\n")[:-1]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert hub.translate(lines, beam=2, max_len_b=6) == wanted
    assert not [str(one.message) for one in said if "pin_memory" in str(one.message)]
    assert [hub.translate(line, beam=2, max_len_b=6) for line in lines[:8]] == wanted[:8]
    assert wanted[2] == wanted[3] == "" and hub.decode(hub.encode(lines[0])) == lines[0]
    hub.max_positions = (len(hub.encode(lines[0])), 100)
    lines[1] = f"{lines[0]} {lines[0]}"
    found = hub.translate(lines[:3], beam=2, max_len_b=6, skip_invalid_size_inputs=True)
    assert found == [wanted[0], "", ""]


@torch.no_grad()
def test_a_hub_scores_translations(hub, raw):
    """The log-probabilities of given translations, as one pass of the model gives them."""
    sources, targets = ((raw / f"test.{side}").read_text().splitlines()[:4] for side in ("en", "de"))
    model, words = hub.models[0], hub.tgt_dict
    for source, target, found in zip(sources, targets, hub.score(sources, targets=targets), strict=True):
        ids = torch.tensor([*map(words.index, hub.target.encode(target)), words.eos()])
        encoded = hub.encode(source)
        output = model(encoded[None], torch.tensor([len(encoded)]), ids.roll(1)[None])
        each = model.get_normalized_probs(output, True)[0].gather(1, ids[:, None])[:, 0]
        assert torch.equal(found["tokens"], ids)
        assert torch.allclose(found["positional_scores"], each, atol=1e-5)
        assert float(found["score"]) == pytest.approx(float(each.mean()), abs=1e-5)
        assert torch.equal(hub.score(source, targets=target)["tokens"], ids)
    for given, said in (({}, "needs targets"), ({"targets": targets[:2]}, "4 sentences need as many targets, got 2")):
        with pytest.raises(ValueError, match=said):
            hub.score(sources, **given)


def trained_like(model, tokens_per_sample: int) -> SimpleNamespace:
    """What sampling reads of a trained model."""
    cfg = SimpleNamespace(task=SimpleNamespace(tokens_per_sample=tokens_per_sample))
    device = torch.device("cpu")
    return SimpleNamespace(model=model, cfg=cfg, task=small_task(), device=device, source=SymbolText())


@pytest.mark.parametrize("prompt", [1, 4, 11])
def test_memory_is_that_of_evaluation(prompt) -> None:
    """Against segments of 4 read in order with memory, each token after those before it."""
    model = randomized(small_xl(position_scheme="transformer_xl", mem_len=6))
    ids = torch.randint(4, 24, (17,), generator=torch.Generator().manual_seed(2))
    expected, memory = [], None
    for start in range(0, 17, 4):
        logits, extra = model(ids[None, start : start + 4], memory=memory)
        expected.append(logits[0].log_softmax(-1))
        memory = extra["memory"]
    expected = torch.cat(expected).float()
    expected[:, :2] = -torch.inf
    reader = causal_lm.Continuation(trained_like(model, 4), rows=2)
    found = [reader.read(ids[:prompt].tolist())]
    found += [reader.add(ids[n].expand(2)) for n in range(prompt, 17)]
    for number, scores in enumerate(found, start=prompt - 1):
        torch.testing.assert_close(scores, expected[number].expand(2, -1), rtol=0, atol=1e-6)


def test_without_memory_the_newer_half_stays() -> None:
    model = randomized(small_lm(position_scheme="m4"))
    ids = torch.randint(4, 24, (9,), generator=torch.Generator().manual_seed(2))
    reader = causal_lm.Continuation(trained_like(model, 6))
    found = [reader.read(ids[:1].tolist())] + [reader.add(ids[n : n + 1]) for n in range(1, 9)]
    for end, scores in enumerate(found, start=1):
        seen = ids[0 if end <= 6 else 3 : end]  # full at 6: the newer 3 stay
        expected = model(seen[None])[0][0, -1].log_softmax(-1).float()
        torch.testing.assert_close(scores[0, 2:], expected[2:], rtol=0, atol=1e-6)


def test_draws_are_among_the_likeliest() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    scores = probs.log().expand(4000, -1)
    cases = (
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.7}, [0, 4 / 7, 0, 3 / 7, 0]),  # 0.4 + 0.3 reach it
        ({"top_p": 0.71}, [0, 0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85, 0]),
        ({"top_k": 3, "top_p": 0.6, "temperature": 0.5}, [0, 0.64, 0, 0.36, 0]),
        ({"temperature": 0}, [0, 1, 0, 0, 0]),
    )
    for choice, shares in cases:
        drawn = causal_lm.Choice(**choice).draw(scores, generator).bincount(minlength=5) / 4000
        expected = torch.tensor(shares, dtype=torch.float32)
        torch.testing.assert_close(drawn, expected, rtol=0, atol=0.03)
        assert not drawn[expected == 0].any()


def test_a_character_model_continues_text(characters, shell) -> None:
    """Drawn or streamed, by one seed; what is drawn has the probability that it is said to have."""
    line, prompt = "sample <characters> --tokens 30 --mem-len 40 --top-k 5 --cpu", ("--prompt", "a_b_c\na")
    streamed = shell(line, *prompt)
    [one] = shell.objects(f"{line} --jsonl", *prompt)
    assert streamed.rstrip("\n") == (one["prompt"] + one["text"]).rstrip("\n")
    assert one["symbols"] == len(one["text"]) == 30
    trained = causal_lm.open_model(characters, None, True)
    words, model = trained.task.source_dictionary, trained.model.double()
    symbols = trained.source.encode(one["prompt"] + one["text"])
    ids = torch.tensor([words.eos(), *map(words.index, symbols)])
    model.mem_len, memory, nats = 40, None, 0.0
    for start in range(0, len(ids) - 1, 8):
        part = ids[start : start + 9]
        logits, extra = model(part[None, :8], memory=memory)
        scores = logits[0].log_softmax(-1)[torch.arange(len(part) - 1), part[1:]]
        nats -= float(scores[max(0, 7 - start) :].sum())  # the first 7 are the prompt's
        memory = extra["memory"]
    assert nats == pytest.approx(one["nats"], abs=0.05)
    several = shell(f"{line} --samples 3 --lines 1", *prompt).splitlines()
    assert sum(line.startswith("== ") for line in several) == 3


def test_the_hub_is_prompted_with_characters_and_memory(characters) -> None:
    """Memory of all the text before gives what the text itself would have given."""
    hub = RelPosTransformerXLModel.from_pretrained(str(characters.parent), characters.name)
    hub.models[0].mem_len = 60
    before, prompt = "a_b_c b_c_d\nc_d_e", "a_b"
    assert hub.decode(hub.encode(prompt)) == prompt
    options = {"beam": 2, "min_len": 12, "max_len_b": 12}
    memory = hub.read(before)
    alone, remembered = (
        hub.generate([hub.encode(prompt)], memory=given, **options)[0][0]["tokens"] for given in (None, memory)
    )
    assert alone.tolist()[:3] == remembered.tolist()[:3] == hub.encode(prompt).tolist()[:-1]
    hypothesis = hub.generate([hub.encode(prompt)], memory=memory, beam=1, max_len_b=12)[0][0]
    whole = torch.cat([hub.encode(before).roll(1), hub.encode(prompt).roll(1)])
    for token in hypothesis["tokens"][3:-1]:  # the last may be forced
        logits = hub.models[0](whole[None])[0][0, -1]
        logits[[0, 1]] = -torch.inf
        assert int(token) == int(logits.argmax())
        whole = torch.cat([whole, token[None]])
    texts = hub.sample([prompt, "b"], beam=1, memory=memory.reorder(torch.tensor([0, 0])))
    assert texts[0] == hub.decode(hypothesis["tokens"]) or len(hypothesis["tokens"]) >= 12
    with pytest.raises(ValueError, match="memory has 2 rows, and there are 3 sentences"):
        hub.generate([hub.encode("a")] * 3, memory=memory.reorder(torch.tensor([0, 0])))


def test_interactive_takes_raw_characters(characters) -> None:
    bpe = FolderText(SimpleNamespace(tokenizer_folder=str(characters.parent / "text")))
    assert bpe.encode("a b_c") == "a ▁ b _ c" and bpe.decode("a ▁ b") == "a b"
    with pytest.raises(ValueError, match="--mask-whole-words needs a tokenizer"):
        bpe.is_beginning_of_word("a")
    with pytest.raises(ValueError, match=r"has no tokenizer, and no manifest\.json"):
        FolderText(SimpleNamespace(tokenizer_folder=str(characters.parent)))


def test_training_says_what_it_could_not_copy(translation, monkeypatch, tmp_path) -> None:
    """A checkpoint that was saved is worth more than its text: training goes on."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hooks, "copy_assets", refuse)
    data = translation[0].parent.parent / "moved" / "data-bin"
    said = train_translation(SimpleNamespace(binary=data), tmp_path, "--max-update", "1")
    assert (tmp_path / "checkpoint_last.pt").is_file()
    assert "text or its card was not written beside" in said


def test_the_card_says_what_is_known(translation, characters) -> None:
    """Its numbers are the checkpoint's and the manifest's."""
    checkpoint = translation[0]
    card = (checkpoint.parent / "MODEL_CARD.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) +\| ([^|]+?) +\|$", card, re.MULTILINE))
    state = torch.load(checkpoint, weights_only=True)
    known = open_translator(checkpoint, None, True).trained.model
    assert rows["parameters"] == f"{sum(one.numel() for one in known.parameters()):,}"
    assert rows["updates"] == "60" and rows["architecture"] == "relpos_transformer_tiny"
    assert rows["encoder: position scheme"] == known.encoder.positions.plan.describe()
    assert float(rows["valid loss, checkpoint_last.pt"]) == state["extra_state"]["val_loss"]
    manifest = json.loads((checkpoint.parent / "text" / "manifest.json").read_text())
    for one in (*manifest["inputs"].values(), *manifest["outputs"].values()):
        assert f"`{one['sha256']}`" in card
    assert manifest["command"] in card and str(torch.__version__) in card
    assert "checkpoint_best" not in (characters.parent / "MODEL_CARD.md").read_text()  # no score


def test_an_averages_folder_is_enough(shell) -> None:
    shell("average <checkpoint> --out average/avg.pt")
    paths = ("average/avg.pt", "<checkpoint>")
    found = [shell(f"translate {path} <raw>/test.en --beam 1 --max-len-b 20 --cpu").splitlines() for path in paths]
    assert found[0] == found[1] and len(found[0]) == 9


def test_an_exports_card_holds_the_checkpoints(translation, tmp_path) -> None:
    write_export_card(translation[0], tmp_path, "CTranslate2", {"quantization": "a|b"})
    card = (tmp_path / "MODEL_CARD.md").read_text()
    assert card.startswith("# Model card: CTranslate2 of checkpoint_last.pt\n")
    assert "a\\|b" in card and "| relpos_transformer_tiny" in card
    assert card.count("# Model card") == 1


def test_every_search_knows_how_long_it_may_get(checkpoint) -> None:
    """Rotations that are scaled by length are so with `--print-alignment` too, another way into the search."""
    told: list[int | None] = []
    trained = open_translator(checkpoint, None, True).trained
    words = trained.task.source_dictionary
    rows = torch.tensor([[5, 6, words.eos()]])
    sample = {"net_input": {"src_tokens": rows, "src_lengths": torch.tensor([3])}}
    extract = trained.model.decoder.forward

    def forward(*args, **kwargs):
        told.append(placement._longest.get())
        return extract(*args, **kwargs)

    trained.model.decoder.forward = forward
    for more in ({}, {"print_alignment": "hard"}, {"sampling": True}):
        given = SimpleNamespace(beam=2, max_len_b=7, **more)
        trained.task.inference_step(trained.task.build_generator([trained.model], given), [trained.model], sample)
        assert told and {*told} == {8}, more
        told.clear()


def test_diverse_groups_are_of_their_own_sentence(checkpoint) -> None:
    """A sentence alone has the hypotheses that it has in a batch, whatever number the data set gives it."""
    trained = open_translator(checkpoint, None, True).trained
    words = trained.task.source_dictionary
    rows = torch.tensor([[5, 6, 7, words.eos()], [9, 8, 7, words.eos()], [6, 6, 5, words.eos()]])
    given = SimpleNamespace(beam=4, max_len_b=7, diverse_beam_groups=2, diverse_beam_strength=0.5)

    def found(chosen: list[int], ids: list[int]) -> list[list[list[int]]]:
        source = {"src_tokens": rows[chosen], "src_lengths": torch.full((len(chosen),), 4)}
        sample = {"id": torch.tensor(ids), "net_input": source}
        generator = trained.task.build_generator([trained.model], given)
        hypotheses = trained.task.inference_step(generator, [trained.model], sample)
        return [[one["tokens"].tolist() for one in row] for row in hypotheses]

    together = found([0, 1, 2], [70, 3, 11])
    assert together == [*found([0], [0]), *found([1], [5]), *found([2], [1])]
    assert together == found([0, 1, 2], [2, 0, 1])


class Echo:
    """A translator whose translations are the source, once for each that is asked for."""

    source = target = SymbolText()
    longest = 3

    def translate(self, batch, search):
        return [[Hypothesis(symbols, -1.0)] * search.nbest for symbols in batch]


@pytest.mark.parametrize(("prompt", "whole"), [("w1 w2", "w1 w2 w7 w3 "), ("w1\n", "w1\nw7 w3 "), ("", "w7 w3 ")])
def test_a_continuation_is_parted_from_its_prompt(prompt: str, whole: str) -> None:
    show = causal_lm.streamer(SymbolText(), prompt)
    assert prompt + "".join(map(show, ["w7", "w3", None])) == whole


def test_lines_that_are_cut_are_named_and_empty_ones_have_as_many_translations(caplog) -> None:
    lines = ["a b", "", "a b c d e", *["a b c d"] * 11]
    found = list(translate(Echo(), lines, Search(beam=3, nbest=2), Batching(cut=True)))
    assert [one.texts for one in found[:3]] == [["a b"] * 2, [""] * 2, ["a b c"] * 2]
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "12 lines were cut to 3 symbols: 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ..."


def test_a_search_may_write_a_symbol() -> None:
    """What fairseq asserts for the shortest line is said of the options."""
    assert Search(max_len_b=1) and Search(max_len_a=0.5, max_len_b=0)
    for options in ({"max_len_b": 0}, {"max_len_a": 0.4, "max_len_b": 0}, {"max_len_b": 4, "min_len": 5}):
        with pytest.raises(ValueError, match=r"--max-len-b is at least \d"):
            Search(**options)
