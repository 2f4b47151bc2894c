"""Run models of transformers' folders in transformers itself, as far as the installed release can."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import NotComparedError, Outputs
from relpos_fairseq.formats.closing_check import PAIR
from relpos_fairseq.heads import CHOICES, CLASSIFIER, MASKED_LM, MODEL, SPANS, TOKENS
from relpos_fairseq.io.packages import remedy
from relpos_fairseq.text import SPECIAL, load_tokenizer
from relpos_fairseq.text.dictionary import BOS, EOS
from relpos_fairseq.text.tokenizer import Pairs
from relpos_fairseq.text.transformers_files import TRIED

_HEAD_BIASES = ("decoder.bias", "lm_head.bias", "predictions.bias")


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
    new = [key for key in loading["missing_keys"] if "pooler" not in key and not key.endswith(_HEAD_BIASES)]
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


def compare_ids(folder: Path, pairs: Pairs) -> tuple[str, Pairs]:
    """Compare a folder's ids with those of AutoTokenizer; return what was found, and what of `pairs` is as there.

    Without transformers nothing is found. Its release 5 may have other ids than 4, whose ids ours are.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return "", pairs
    release = transformers_release()
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        found = [theirs(text, add_special_tokens=False)["input_ids"] for text in (*TRIED, *PAIR)]
        single, pair = theirs(PAIR[0]), theirs(*PAIR)
    except Exception as error:  # whatever a release makes of a folder that it does not know
        why = " ".join(str(error).split())[:99]
        return f"ids were not compared: {release} does not load the tokenizer ({why})", pairs
    ours, said = load_tokenizer(folder), ""
    for key, given, parts in (("usual", pair, found[-2:]), ("alone", single, found[-2:-1])):
        there = given["input_ids"], given.get("token_type_ids", [0] * len(given["input_ids"]))
        here = ours.pairs.joined(parts, ours.numbers[SPECIAL[BOS]], ours.numbers[SPECIAL[EOS]])
        if getattr(pairs, key) and here != there:
            pairs, one = pairs._replace(**{key: False}), int(here[0] == there[0])
            what = ("pairs" if key == "usual" else "single texts") + " in their token types" * one
            said = f"{what} differ from AutoTokenizer's of {release}: {there[one]} there, {here[one]} here"
    own = [[ours.numbers[symbol] for symbol in ours.encode(text).pieces] for text in TRIED]
    differing = [text for text, first, second in zip(TRIED, own, found, strict=False) if first != second]
    if differing:
        said = f"ids of {len(differing)} of {len(TRIED)} texts differ from AutoTokenizer's of {release}"
        said += f" ({differing[0]!r})"
        if not theirs.is_fast:  # a class in Python reads no tokenizer.json
            said += ": ours are those of tokenizer.json"
        elif not release.removeprefix("transformers ").startswith("4."):
            said += ": ours are those of transformers 4.46, and the result's own tokenizer.json keeps them"
            return said, pairs
        pairs = pairs._replace(alone=False)
    return said or f"ids of {len(TRIED)} texts equal AutoTokenizer's ({release})", pairs
