"""generate() of exported models: greedy and beam search choose what fairseq's generator chooses."""

from __future__ import annotations

import shutil

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from helpers.commands import train
from helpers.exported import fairseqs, generating
from helpers.models import small_config, small_task
from helpers.twins import language, translation, values_of, with_memory
from relpos_fairseq.export import transformers_folder as decoders
from relpos_fairseq.export.transformers import RelPosForSeq2SeqLM, RelPosTranslationConfig
from relpos_fairseq.formats.base import read
from relpos_fairseq.inference.checkpoints.loading import load_translator
from relpos_fairseq.inference.translator import Batching, Search, translate
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.saved.checkpoint import OURS
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.schemes import scheme_names

LONGEST = 30
SEEDS = range(1, 9)  # of models, until one of them ends a sentence
GREEDY = {"do_sample": False, "suppress_tokens": [1]}
SEARCH = {"min_new_tokens": 1, "early_stopping": True, "max_new_tokens": LONGEST, "output_scores": True, **GREEDY}
SEARCH |= {"return_dict_in_generate": True}
FEW = ("m4", "rope", "tupe")  # the others only in long runs
EVERY = [*scheme_names(), "rope+m4", "rope+t5/t5+m4"]
SCHEMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in EVERY]
pytestmark = pytest.mark.usefixtures("no_grad")


def until_end(row) -> list[int]:
    """Tokens up to the first </s>, which is one of them."""
    tokens = row.tolist()
    return tokens[: tokens.index(2) + 1] if 2 in tokens else tokens


def compare(ours, theirs, scores, before: int, longest: int = LONGEST) -> int:
    """Compare best hypotheses; returns how many ended before they had to."""
    ended = 0
    for row, found in enumerate(theirs):
        if max(len(one["tokens"]) for one in ours[row]) > longest:
            continue  # fairseq adds </s> to what it cuts, transformers leaves it open
        ended += 1
        assert until_end(found[before:]) == ours[row][0]["tokens"].tolist()
        if scores is not None:
            assert abs(float(scores[row]) - float(ours[row][0]["score"])) < 1e-6
    return ended


@pytest.mark.parametrize("scheme", SCHEMES)
def test_translations_are_fairseqs(scheme):
    assert any(translations_end(*translation(scheme, seed)) for seed in SEEDS)


def translations_end(model, twin) -> bool:
    """Compare; returns whether any ended by itself."""
    draw = torch.Generator().manual_seed(5)
    source = torch.randint(4, 24, (6, 9), generator=draw)
    source[:, -1], source[1, :3], source[2, :6] = 2, 1, 1
    sample = {"net_input": {"src_tokens": source, "src_lengths": (source != 1).sum(1)}}
    ended = 0
    for beam in (1, 4):
        words = small_task().target_dictionary
        ours = SequenceGenerator([model], words, beam_size=beam, max_len_b=LONGEST).generate([model], sample)
        mask = (source != 1).long()
        theirs = twin.generate(source, attention_mask=mask, num_beams=beam, **SEARCH)
        ended += compare(ours, theirs.sequences, theirs.get("sequences_scores"), 1)
    given = {"input_ids": source, "decoder_input_ids": source[:, -1:]}
    masked, unmasked = twin(**given, attention_mask=mask).logits, twin(**given).logits
    assert torch.equal(masked, unmasked)
    assert torch.equal(twin(**given, attention_mask=torch.ones_like(mask)).logits, unmasked)  # padding is by its symbol
    return ended > 0


def test_the_defaults_of_a_folder_are_fairseqs_search():
    """200 sources, short and long, by generate() without options, of a model that ends sentences at any length."""
    model, twin = next(pair for pair in (translation("learned", seed) for seed in SEEDS) if translations_end(*pair))
    twin.generation_config = decoders.search_of(model)
    words, draw = small_task().target_dictionary, torch.Generator().manual_seed(3)
    search, ended, early = SequenceGenerator([model], words, beam_size=5, max_len_b=200), 0, 0
    for length in (1, 3, 9, 40):
        source = torch.randint(4, 24, (50, length + 1), generator=draw)
        source[:, -1] = 2
        ours = search.generate([model], {"net_input": {"src_tokens": source, "src_lengths": (source != 1).sum(1)}})
        found = twin.generate(source)
        ended += compare(ours, found, None, 1, 63)
        early += sum(len(row[0]["tokens"]) < 8 for row in ours)
    assert ended > 20 and early > 5


@pytest.mark.nightly  # trains the quickstart for a minute
def test_a_trained_folder_translates_as_relpos_translate(ways):
    """The quickstart's corpus: 120 short and 80 long sentences."""
    ways.run("quickstart", "--out", ways / "run", "--max-update", "300", "--threads", "1")
    [checkpoint] = (ways / "run").rglob("checkpoint_best.pt")
    ways.export(checkpoint)
    [raw] = (ways / "run").glob("data/*/raw")
    lines = [*list(read_lines(raw / "test.en"))[:120], *list(read_lines(raw / "test_long.en"))[:80]]
    ours = translate(load_translator(checkpoint, None, True), lines, Search(), Batching(max_sentences=40))
    tokenizer, model = ways.tokenizer("out"), ways.opened("out", "AutoModelForSeq2SeqLM")
    theirs = []
    for start in range(0, len(lines), 40):
        batch = tokenizer(lines[start : start + 40], padding=True, return_tensors="pt")
        theirs += tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
    assert [one.texts[0] for one in ours] == theirs


@pytest.mark.parametrize("scheme", SCHEMES)
def test_continuations_are_fairseqs(scheme):
    """Fairseq counts the prompt's scores and symbols too, so scores are not divided by lengths."""
    assert any(continuations_end(*language(scheme, seed)) for seed in SEEDS)


def continuations_end(model, twin) -> bool:
    """Compare; returns whether any ended by itself."""
    prompt = torch.randint(4, 24, (6, 4), generator=torch.Generator().manual_seed(6))
    sample = {"net_input": {"src_tokens": prompt, "src_lengths": prompt.new_full((6,), 4)}}
    begun = torch.cat([prompt.new_full((6, 1), 2), prompt], dim=1)
    search, ended = SEARCH | {"min_new_tokens": None, "length_penalty": 0.0}, 0
    for beam in (1, 4):
        words = small_task().target_dictionary
        generator = SequenceGenerator([model], words, beam_size=beam, max_len_b=LONGEST + 4, normalize_scores=False)
        ours = generator.generate([model], sample, prefix_tokens=prompt, bos_token=2)
        theirs = twin.generate(begun, num_beams=beam, **search).sequences
        ended += compare(ours, theirs, None, 1, LONGEST + 4)
    # Rows of different lengths, padded on the left, are as if each were alone.
    left = torch.cat([begun.new_full((6, 2), 1), begun[:, :3]], dim=1)
    both, mask = torch.cat([begun, left]), torch.cat([begun, left]).ne(1).long()
    together = twin.generate(both, attention_mask=mask, num_beams=1, **search).sequences
    alone = twin.generate(begun[:, :3], num_beams=1, **search).sequences
    for row in range(6):
        assert until_end(together[6 + row, 5:]) == until_end(alone[row, 3:])
    return ended > 0


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A translation model of one update."""
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder / "model", "--position-scheme", "m4", "--max-update", "1")
    return folder / "model" / "checkpoint_last.pt"


def test_a_checkpoint_becomes_a_folder(trained, ways):
    """Text in, text out; saved again and loaded again; the card says what is known."""
    ways.export(trained)
    tokenizer, model = ways.tokenizer("out"), ways.opened("out", "AutoModelForSeq2SeqLM")
    source = tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    assert source["input_ids"][1].tolist()[1:] == [2, 1, 1]
    found = model.generate(**source, num_beams=3, max_new_tokens=8)
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in found]
    assert texts == fairseqs(trained, source["input_ids"])
    model.save_pretrained(ways / "again")
    again = ways.opened("again", "AutoModelForSeq2SeqLM")
    labels = source["input_ids"].masked_fill(source["input_ids"] == 1, -100)
    before, after = (one(**source, labels=labels) for one in (model, again))
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-5)
    assert before.loss > 0 and not list((ways / "again").glob("*.bin"))
    assert "decoder: position scheme" in (ways / "out/MODEL_CARD.md").read_text()


@pytest.mark.parametrize("kind", [*OURS][1:])
def test_the_way_back(kind, trained, ways):
    """What transformers saved again is a checkpoint of the same model, with its text."""
    two = kind == "relpos_transformer"
    checkpoint = trained if two else generating(kind, ways.here, scheme="shaw")
    ways.export(checkpoint)
    model = ways.opened("out", "AutoModelForSeq2SeqLM" if two else "AutoModelForCausalLM")
    next(model.parameters()).add_(0.5)  # as a training does
    model.save_pretrained(ways / "saved")
    shutil.copytree(ways / "out/text", ways / "saved/text")
    ways.convert("saved", "back")
    loaded, task = SavedModel.open(ways / "back/model.pt").build_anyway(ways / "back/text")
    before, _ = SavedModel.open(checkpoint).build_anyway(None)
    tokens = torch.tensor([[2, 5, 6, 7], [2, 9, 4, 8]])
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if two else {})
    ours = loaded(*((tokens, None, tokens) if two else (tokens,)))[0]
    torch.testing.assert_close(ours, model(**given).logits, rtol=0, atol=1e-5)
    assert not torch.equal(*(next(one.parameters()) for one in (loaded, before)))
    if two:
        assert (task.cfg.source_lang, task.cfg.target_lang) == ("src", "tgt")
    assert len(task.target_dictionary) == len(loaded.decoder.dictionary)


@pytest.mark.parametrize("padding", [3, 4, 5])
@pytest.mark.parametrize("scheme", ["m4", "transformer_xl", "rope"])
def test_memory_is_the_cache(scheme, padding):
    """Tokens beyond a segment see what it left, in greedy and in beam search."""
    model, twin, prompt = with_memory(scheme)
    prompt[1, :padding] = 1
    given = {"attention_mask": (prompt != 1).long(), "max_new_tokens": 9, "eos_token_id": None} | GREEDY
    found = {beam: twin.generate(prompt, num_beams=beam, **given) for beam in (1, 3)}
    whole = twin(found[1]).logits
    memory, rows = None, []
    for part in found[1].split(4, dim=1):
        output, extra = model.decoder(part, memory=memory)
        memory = extra["memory"]
        rows.append(output)
    torch.testing.assert_close(whole, torch.cat(rows, dim=1), rtol=0, atol=1e-10)
    whole[..., 1] = -torch.inf
    assert torch.equal(whole[:, 5:-1].argmax(-1), found[1][:, 6:])
    without = twin.generate(prompt, num_beams=3, use_cache=False, **given)
    assert torch.equal(without, found[3])


@pytest.mark.parametrize("beam", [1, 2])
def test_rows_that_ended_do_not_stop_others(beam):
    """Rows end in different segments, and are padded from there on."""
    _, twin, prompt = with_memory("m4")
    ended = 0
    for end in (3, 7, 22):
        given = {"max_new_tokens": 9, "num_beams": beam, "early_stopping": beam > 1, "eos_token_id": end} | GREEDY
        found = twin.generate(prompt, **given)
        assert torch.equal(found, twin.generate(prompt, use_cache=False, **given))
        ended += int((found[:, 9:] == 1).any(1).sum())
    assert ended


def test_prompts_padded_on_the_right_are_refused():
    _, twin, prompt = with_memory("m4")
    prompt[1, 5:] = 1
    with pytest.raises(ValueError, match="1 of 3 prompts have padding after .* pad on the left"):
        twin.generate(prompt, attention_mask=(prompt != 1).long(), max_new_tokens=2)


def test_a_dictionary_without_its_last_word_is_another_models(tmp_path):
    """A task that translates adds no <mask> to it, as one that fills masks does."""
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    config = RelPosTranslationConfig(values_of(small_config(position_scheme="t5")), 24, task, source_rows=23)
    RelPosForSeq2SeqLM(config).save_pretrained(tmp_path)
    (tmp_path / "text").mkdir()
    words = [f"w{number} 1\n" for number in range(20)]
    (tmp_path / "text" / "dict.de.txt").write_text("".join(words[:19]))
    (tmp_path / "text" / "dict.en.txt").write_text("".join(words))
    assert read(tmp_path).rows == 23
    (tmp_path / "text" / "dict.en.txt").write_text("".join(words[:19]))
    with pytest.raises(UserError, match=r"dict\.en\.txt makes 23 rows, and the model has 24"):
        read(tmp_path)
