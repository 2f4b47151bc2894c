"""Run models of transformers' folders in transformers itself, as far as the installed release can."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import NotComparedError, Outputs
from relpos_fairseq.formats.closing_check import PAIR
from relpos_fairseq.heads import CHOICES, CLASSIFIER, MASKED_LM, MODEL, SPANS, TOKENS
from relpos_fairseq.io.packages import remedy
from relpos_fairseq.text import MASK, SPECIAL, Tokenizer, load_tokenizer
from relpos_fairseq.text.dictionary import BOS, EOS, WORD_START
from relpos_fairseq.text.tokenizer import Pairs
from relpos_fairseq.text.transformers_files import TRIED

# Of drawn texts: spaces of all kinds, signs that classes replace, what a normalization changes.
SIGNS = " |  |\t|\u00a0|\u200b|``|''|\"|'|9,|.|-|\u0301|\u00c9|\ufb01|\u4eac".split("|")
DRAWN = 400


def transformers_release() -> str:
    """Return the name and version of the installed transformers, without importing it."""
    try:
        return f"transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        return "transformers"


def load_in_transformers(name: str, folder: Path) -> Any:
    """Load a folder by a class of transformers, in fp64 and evaluation mode.

    Raises:
        NotComparedError: transformers is absent, or does not load the folder as it is.
    """
    try:
        import transformers
    except ImportError as error:
        raise NotComparedError(
            f"transformers does not import here ({' '.join(str(error).split())[:99]}): {remedy('transformers')}"
        ) from error
    version, verbosity = transformers_release(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        how = {"trust_remote_code": False, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(folder, **how)
        config.return_dict, config.torchscript = True, False  # whatever the folder says
        model, loading = getattr(transformers, name).from_pretrained(
            folder, config=config, output_loading_info=True, **how
        )
    except Exception as error:  # whatever a release makes of a folder that it does not know
        raise NotComparedError(f"{version} does not load the folder ({' '.join(str(error).split())[:99]})") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    biases = ("decoder.bias", "lm_head.bias", "predictions.bias")  # of heads
    new = [key for key in loading["missing_keys"] if "pooler" not in key and not key.endswith(biases)]
    unread = [key for key in loading["unexpected_keys"] if "distance_embedding" in key]  # as of 5
    if new or unread:
        raise NotComparedError(f"{version} does not read the folder as it is ({[*new, *unread][0]})")
    return model.double().eval()


@torch.no_grad()
def run_in_transformers(
    folder: Path, kinds: Collection[str], bias: Tensor | None, tokens: Tensor, padding: Tensor, types: Tensor
) -> Outputs:
    """Run a folder's encoder and its heads in transformers, in fp64.

    Args:
        folder: the folder.
        kinds: the outputs that its heads have, `Head.kind` each.
        bias: of the masked LM's logits, which transformers 4 may lose when it loads.
        tokens: (B, T) ids of the folder's own vocabulary.
        padding: (B, T) True at padding.
        types: (B, T) token types.

    Returns:
        `features` (B, T, E), and every head's output by its kind; of choices, each alone, as `classification`.

    Raises:
        NotComparedError: transformers is absent, or does not load the folder as it is.
    """
    given = {"input_ids": tokens, "attention_mask": (~padding).long(), "token_type_ids": types}
    found: Outputs = {}
    for head in [head for head in (MASKED_LM, CLASSIFIER, SPANS, TOKENS, CHOICES) if head.kind in kinds] or [MODEL]:
        model = load_in_transformers(head.auto, folder)
        if "token_type_ids" not in inspect.signature(model.forward).parameters:
            given.pop("token_type_ids", None)
        if head is MASKED_LM and bias is not None and (own := model.get_output_embeddings().bias).shape == bias.shape:
            own.copy_(bias)
        shown = {name: value[:, None] for name, value in given.items()} if head is CHOICES else given  # one a question
        output = model(**shown, output_hidden_states=True)
        found["features"] = output.hidden_states[-1]
        if head is SPANS:
            found["spans"] = torch.stack([output.start_logits, output.end_logits], -1)
        elif head is not MODEL:
            found[CLASSIFIER.kind if head is CHOICES else head.kind] = output.logits
    return found


def compare_ids(folder: Path, pairs: Pairs, masked: bool) -> tuple[Pairs, list[str], list[str]]:
    """Compare a folder's ids with those of AutoTokenizer.

    Args:
        folder: the folder.
        pairs: how its texts are joined here.
        masked: whether it fills masks.

    Returns:
        What of `pairs` is as there, what was found, and what was not compared or is read otherwise on purpose.
    """
    release = transformers_release()
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        parts, single, pair = _ids(theirs, PAIR), theirs(PAIR[0]), theirs(*PAIR)
    except ImportError:
        return pairs, [], []  # nor are outputs compared, which is said
    except Exception as error:  # whatever a release makes of a folder that it does not know
        why = " ".join(str(error).split())[:99]
        return pairs, [], [f"ids of texts, which were not compared: {release} does not load the tokenizer ({why})"]
    ours, said = load_tokenizer(folder), []
    for key, given, count in (("usual", pair, 2), ("alone", single, 1)):
        there = given["input_ids"], given.get("token_type_ids", [0] * len(given["input_ids"]))
        here = ours.pairs.joined(parts[:count], ours.numbers[SPECIAL[BOS]], ours.numbers[SPECIAL[EOS]])
        if getattr(pairs, key) and here != there:
            pairs, one = pairs._replace(**{key: False}), int(here[0] == there[0])
            what = ("pairs" if key == "usual" else "single texts") + " in their token types" * one
            said.append(f"{what} differ from AutoTokenizer's of {release}: {there[one]} there, {here[one]} here")
    texts = [*TRIED, *_drawn(ours)]
    own = (one.pieces for one in ours.encode_batch(texts))
    if differing := _differing(texts, ours, own, _ids(theirs, texts)):
        whose = "transformers 4.46" if theirs.is_fast else "tokenizer.json"  # which a class in Python does not read
        said.append(
            f"ids of {len(differing)} of {len(texts)} texts differ from AutoTokenizer's of {release} "
            f"({min(differing, key=len)!r}): ours are those of {whose}"
        )
        pairs = pairs._replace(alone=False)
    apart = _masks_apart(ours, theirs) if masked and theirs.mask_token else []
    return pairs, said or [f"ids of {len(texts)} texts equal AutoTokenizer's ({release})"], apart


def _masks_apart(ours: Tokenizer, theirs: Any) -> list[str]:
    """Return, in words, what texts with a mask have other ids than there: ours are those that training saw."""
    texts = ("a <mask> a", "a <mask>.")
    there = _ids(theirs, [text.replace(MASK, theirs.mask_token) for text in texts])
    found = _differing(texts, ours, map(ours.encode_masked, texts), there)
    return [f"texts such as {text!r}: a mask stands as a word does, and not as in transformers" for text in found[:1]]


def _ids(tokenizer: Any, texts: Iterable[str]) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _differing(texts: Iterable[str], ours: Tokenizer, own: Iterable[list[str]], there: list[list[int]]) -> list[str]:
    """Return the texts whose symbols here have other numbers than there."""
    found = zip(texts, own, there, strict=True)
    return [text for text, symbols, ids in found if [ours.numbers.get(one) for one in symbols] != ids]


def _drawn(ours: Tokenizer) -> list[str]:
    """Draw texts of signs, spaces, and a vocabulary's pieces, in which no special symbol stands."""
    random = Random(1)
    pieces = [ours.pieces[symbol].replace(WORD_START, " ").replace("\u0120", " ") for symbol in ours.symbols]
    parts = (pieces, [*SIGNS, *(one for one in ours.added if one not in ours.names.values())])
    texts = ["".join(random.choice(random.choice(parts)) for _ in range(random.randint(1, 6))) for _ in range(DRAWN)]
    return [text for text in texts if not any(name in text for name in ours.names.values())]
