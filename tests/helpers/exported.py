"""Checkpoints with text beside them, to be exported."""

from __future__ import annotations

import json

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator

from helpers.conversion import config, random_state
from helpers.lm_models import randomized
from relpos_fairseq.models.building import build_generating, build_roberta
from relpos_fairseq.models.roberta_hub import RelPosRobertaHub
from relpos_fairseq.saved.checkpoint import OURS, checkpoint_of
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text import load_tokenizer, train_tokenizer

CLASSIFIED = {"_name": "sentence_prediction", "classification_head_name": "mine", "num_classes": 3}
CLASSIFIED |= {"init_token": 0, "separator_token": 2}  # the task of the head `mine`
VERBS, NOUNS = ("sees", "hears", "makes"), ("house", "horse", "mouse", "hearse")
TEXTS = [f"the {a} {b} a {c}, née Zoë." for a in ("old", "new") for b in VERBS for c in NOUNS]


def write_text(folder, kind: str) -> int:
    """A checkpoint's text/; returns the rows of its model."""
    if kind == "symbols":
        folder.mkdir()
        (folder / "dict.txt").write_text("the 1\nold 1\nhouse 1\n", encoding="utf-8")
    else:
        name = "bpe" if kind == "gpt2" else kind
        train_tokenizer(name, folder, vocab_size=300 if name == "bpe" else 60, texts=TEXTS)
    if kind == "gpt2":
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        (folder / "encoder.json").write_text(json.dumps(model["vocab"]))
        (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
        (folder / "tokenizer.json").unlink()
        numbers = sorted(model["vocab"].values(), reverse=True)  # by count: another order
        (folder / "dict.txt").write_text("".join(f"{n} 1\n" for n in numbers))
    return len((folder / "dict.txt").read_text(encoding="utf-8").splitlines()) + 5


def write_checkpoint(folder, kind="bpe", scheme="m4", classes=0, spans=False, tokens=0, task=None, **values):
    """A checkpoint with text/ beside it, and its model."""
    rows = write_text(folder / "text", kind)
    source = config(scheme, activation_fn="gelu", **values)
    state = random_state(source, torch.float32)
    draw = torch.Generator().manual_seed(3)
    for name in ("sentence_encoder.embed_tokens", "lm_head"):
        state[f"encoder.{name}.weight"] = torch.randn(rows, 16, generator=draw)
    state["encoder.lm_head.weight"] = state["encoder.sentence_encoder.embed_tokens.weight"]
    state["encoder.lm_head.bias"] = torch.randn(rows, generator=draw)
    heads = {"classification_heads.mine.dense": 16 * bool(classes), "classification_heads.mine.out_proj": classes}
    heads |= {"span_heads.spans.out_proj": 2 * spans, "token_heads.entities.out_proj": tokens}
    for name, size in heads.items():
        if size:
            state[f"{name}.weight"] = torch.randn(size, 16, generator=draw)
            state[f"{name}.bias"] = torch.randn(size, generator=draw)
    if classes or tokens:
        (folder / "text" / "label").mkdir()
        (folder / "text" / "label" / "dict.txt").write_text("yes 5\nno 3\nperhaps 1\n")
    checkpoint = checkpoint_of("relpos_roberta", source, state, task or {})
    torch.save(checkpoint, folder / "model.pt")
    return build_roberta(source, state), folder / "model.pt"


DECODER = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 2, "decoder_attention_heads": 2}
GENERATING = {
    "relpos_transformer": {name.replace("decoder", "encoder"): value for name, value in DECODER.items()}
    | {**DECODER, "max_source_positions": 20, "max_target_positions": 24},
    "relpos_transformer_lm": {**DECODER, "share_decoder_input_output_embed": True, "tokens_per_sample": 20},
    "relpos_transformer_xl": {**DECODER, "tokens_per_sample": 6, "mem_len": 8},
}


def generating(kind: str, folder, text: bool = True, scheme: str = "m4", **more):
    """A checkpoint of a random model of 24 symbols, with text beside it."""
    values = GENERATING[kind] | {"position_scheme": scheme} | more
    model = randomized(build_generating(kind, values, (24, 24))).float()
    task = {"_name": OURS[kind].task}
    task |= {"source_lang": "en", "target_lang": "de"} if kind == "relpos_transformer" else {"tokens_per_sample": 20}
    folder.mkdir(parents=True, exist_ok=True)
    if text:
        (folder / "text").mkdir()
        for name in ("dict.en.txt", "dict.de.txt") if kind == "relpos_transformer" else ("dict.txt",):
            words = [f"w{number}" for number in range(19)] + ["man,"]
            (folder / "text" / name).write_text("".join(f"{word} 1\n" for word in words[:: 1 if "de" in name else -1]))
    torch.save(checkpoint_of(kind, values, model.state_dict(), task), folder / "model.pt")
    return folder / "model.pt"


def spoilt_before(monkeypatch, module, check: str, spoil) -> None:
    """Let a folder be spoilt when it is whole, as a release or a file would, before a check of a module's."""
    original = getattr(module, check)

    def spoilt(folder, *given, **how):
        spoil(folder)
        return original(folder, *given, **how)

    monkeypatch.setattr(module, check, spoilt)


def computing_otherwise(folder, cls: str, line: str) -> None:
    """Let an exported folder's own code change what a model's forward found."""
    code = f"run = {cls}.forward\ndef other(self, *given, **how):\n    found = run(self, *given, **how)\n"
    with (folder / "relpos_code.py").open("a") as file:
        file.write(f"{code}    {line}\n    return found\n{cls}.forward = other\n")


def hub_of(folder, model, kind):
    """The checkpoint's own text."""
    dictionary = Dictionary.load(str(folder / "text" / "dict.txt"))
    dictionary.add_symbol("<mask>")
    task = type("Task", (), {"source_dictionary": dictionary, "cfg": {}})
    tokenizer = None if kind == "symbols" else load_tokenizer(folder / "text")
    return RelPosRobertaHub(None, task, model, tokenizer)


def fairseqs(checkpoint, source) -> list[str]:
    """What fairseq's beam search makes of source tokens, as far as eight symbols go."""
    loaded, task = SavedModel.open(checkpoint).build_anyway(checkpoint.parent / "text")
    words = task.target_dictionary
    search = SequenceGenerator([loaded], words, beam_size=3, max_len_b=8)
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    return [words.string(best[0]["tokens"][:8]) for best in search.generate([loaded], sample)]
