"""Folders with tokenizers as a release of transformers wrote them, a setting each; tokenizers trained here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from helpers import ROOT
from relpos_fairseq.text import Tokenizer, load_tokenizer, train_tokenizer

ODD = ROOT.parent / "shared" / "odd"
SENTENCES = [
    "Ich möchte die Häuser in İstanbul sehen, Zoë!",
    "A man is riding a bike, and a woman laughs.",
    "東京 is a city; 北京 too. covid19 was new (in 2019).",
    "  two  spaces, a tab\tand ﬁne ligatures ½ e\u0301 ",
]


def lines() -> list[str]:
    """Odd lines, of which neither fairseq's nor a library's own symbols are any."""
    if not ODD.is_dir():
        return []
    return [line.decode("utf-8", "replace") for line in (ODD / "lines.txt").read_bytes().split(b"\n")]


def wordpiece_folder(folder: Path) -> None:
    words = sorted({word for text in SENTENCES for word in text.lower().replace(",", " ,").split()})
    letters = sorted(set("".join(SENTENCES + [text.lower() for text in SENTENCES])) - set(" \t"))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{one}" for one in letters), *words]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n", encoding="utf-8")


def bpe_folder(folder: Path, special: Sequence[str] = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")) -> None:
    train_tokenizer("bpe", folder, texts=SENTENCES * 3, vocab_size=340)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    pieces = [*special[:4], *sorted(model["vocab"], key=model["vocab"].get), special[4]]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(model["merges"]) + "\n")
    for name in ("tokenizer.json", "dict.txt"):
        (folder / name).unlink()


def sentencepiece_folder(folder: Path, name: str, **more) -> None:
    import sentencepiece

    with (folder / name).open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 9), model_writer=model, vocab_size=110, hard_vocab_limit=False, **more
        )


DEBERTA = dict(pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]")
DEBERTA |= {"unk_piece": "[UNK]"}
ALBERT = DEBERTA | {"pad_piece": "<pad>", "unk_piece": "<unk>"}
MAKERS = {
    "bert": wordpiece_folder,
    "roberta": bpe_folder,
    "deberta": lambda folder: bpe_folder(folder, ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")),
    "xlm-roberta": lambda folder: sentencepiece_folder(folder, "sentencepiece.bpe.model"),
    "deberta-v2": lambda folder: sentencepiece_folder(folder, "spm.model", **DEBERTA),
    "albert": lambda folder: sentencepiece_folder(folder, "spiece.model", **ALBERT),
}
ENTITY = {"content": "[E1]", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False, "special": True}
WORD = {
    "content": "covid19",
    "lstrip": False,
    "rstrip": False,
    "single_word": True,
    "normalized": True,
    "special": False,
}
TOLD = {"cls_token": "@c", "sep_token": "@s", "pad_token": "@p", "unk_token": "[UNK]", "mask_token": "@m"}
# model type, tokenizer_config.json, special_tokens_map.json, added_tokens.json
SETTINGS = {
    "no settings": ("bert", None, None, None),
    "cased": ("bert", {"do_lower_case": False}, None, None),
    "cased without accents": ("bert", {"do_lower_case": False, "strip_accents": True}, None, None),
    "uncased with accents": ("bert", {"strip_accents": False}, None, None),
    "ideographs are no words": ("bert", {"tokenize_chinese_chars": False}, None, None),
    "added by number": ("bert", {"added_tokens_decoder": {"{n}": WORD, "{n+1}": ENTITY}}, None, None),
    "added by file": ("bert", {}, {"additional_special_tokens": ["[E1]"]}, {"covid19": 0, "[E1]": 1}),
    "named by map": ("bert", {"cls_token": "@x"}, TOLD, None),
    "more special tokens": ("bert", {"additional_special_tokens": ["[E1]", "man"]}, None, None),
    "split special tokens": ("bert", {"split_special_tokens": True, "additional_special_tokens": ["[E1]"]}, None, None),
    "spaces at the start": ("roberta", {"add_prefix_space": True}, None, None),
    "bytes and an added word": ("roberta", {}, None, {"covid19": 0, "東京": 1}),
    "bytes of DeBERTa": ("deberta", {"tokenizer_class": "DebertaTokenizer"}, None, {"covid19": 0}),
    "sentencepiece": ("xlm-roberta", None, None, None),
    "sentencepiece and added words": ("xlm-roberta", {}, {"additional_special_tokens": [ENTITY]}, {"covid19": 0}),
    "another class's settings": ("xlm-roberta", {"do_lower_case": True, "add_prefix_space": False}, None, None),
    "DeBERTa": ("deberta-v2", {}, None, None),
    "DeBERTa in lower case": ("deberta-v2", {"do_lower_case": True, "split_by_punct": True}, None, None),
    "DeBERTa and an added word": ("deberta-v2", {"added_tokens_decoder": {"{n+1}": WORD}}, None, None),
    "ALBERT": ("albert", None, None, None),
    "ALBERT with capitals and accents": ("albert", {"do_lower_case": False, "keep_accents": True}, None, None),
}


def write_folders(root: Path) -> dict[str, Path]:
    """Write a folder for each of `SETTINGS`; return them by name."""
    made = {}
    for name, (kind, config, special, added) in SETTINGS.items():
        folder = made[name] = root / name
        folder.mkdir(parents=True)
        MAKERS[kind](folder)
        if kind == "albert" or (kind, config) == ("xlm-roberta", None):
            config = config or {}
        size = len(load_tokenizer(folder).numbers)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        for file, content in (("tokenizer_config", config), ("special_tokens_map", special), ("added_tokens", added)):
            if file == "added_tokens" and added:
                content = {token: size + number for token, number in added.items()}
            if content is not None:
                text = json.dumps(content).replace("{n}", str(size)).replace("{n+1}", str(size + 1))
                (folder / f"{file}.json").write_text(text)
    return made


TRAINED = {
    "bpe": {"vocab_size": 400},
    "wordpiece": {"vocab_size": 300},
    "wordpiece uncased": {"vocab_size": 300, "lowercase": True},
    "sentencepiece": {"vocab_size": 110},
    "sentencepiece bpe": {"vocab_size": 110, "model_type": "bpe"},
    "sentencepiece bytes": {"vocab_size": 380, "byte_fallback": True},
}


def train(name: str, folder: Path) -> Tokenizer:
    """Train the tokenizer of a row of `TRAINED`."""
    return train_tokenizer(name.split()[0], folder, texts=SENTENCES * 9, **TRAINED[name])
