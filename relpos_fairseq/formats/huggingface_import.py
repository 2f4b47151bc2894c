"""Read BERT, RoBERTa, XLM-R, DistilBERT and DeBERTa folders of Hugging Face's library as relpos models.

    absolute              learned (RoBERTa's table begins after its padding row)
    relative_key          shaw_keys, a_r = E_{-r}: transformers reads its table over i - j
    relative_key_query    m4, the same table in both terms
    token types           --segment-encoding input; a single type, the same for every token, joins
                          the position table (or stays a segment where positions are relative)
    layer_norm_eps        --layer-norm-eps
    DeBERTa               `hf_deberta`

Rows of the embedding are put in fairseq's order (`vocabulary`); `names` has the names of tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq import heads
from relpos_fairseq.conversion.layouts import ENCODER, VERSION, State, encode_text
from relpos_fairseq.conversion.report import PADDING, ConversionError, Outputs
from relpos_fairseq.formats import hf_deberta
from relpos_fairseq.formats.huggingface_folder import (
    ACTIVATIONS,
    DISENTANGLED,
    KINDS,
    LM_BIAS,
    LM_WEIGHT,
    Folder,
    read_folder,
)
from relpos_fairseq.formats.in_transformers import compare_ids, run_in_transformers, transformers_release
from relpos_fairseq.heads import CHOICES, CLASSIFIER, MASKED_LM, MODEL, SPANS, TOKENS
from relpos_fairseq.saved.checkpoint import ROBERTA
from relpos_fairseq.saved.identity import DEFAULTS
from relpos_fairseq.saved.ledger import KEPT, Recorded
from relpos_fairseq.saved.model import Origin, SavedModel
from relpos_fairseq.schemes import scheme_class
from relpos_fairseq.text import load_tokenizer
from relpos_fairseq.text.dictionary import FILE as DICTIONARY

EMBEDDING = f"{ENCODER}.embed_tokens.weight"
# Keys of config.json that are written as they were.
NAMED = ("id2label", "label2id", "type_vocab_size")
# What tells that a head is there, by the kind of its output.
SHOWN_BY = {
    MASKED_LM.kind: "encoder.lm_head.dense.weight",
    **{head.kind: head.shown for head in (CLASSIFIER, SPANS, TOKENS, CHOICES)},
}


def read_huggingface(path: Path, config: Recorded) -> SavedModel:
    """Read a BERT, RoBERTa, XLM-R, DistilBERT or DeBERTa folder.

    Raises:
        ConversionError: as `read_folder`.
    """
    folder = read_folder(path, config)
    other = CLASSIFIER if folder.head is CHOICES else CHOICES  # of the same tensors
    kinds = [kind for kind, name in SHOWN_BY.items() if name in folder.state and kind != other.kind]
    head = folder.head
    if head is None or (head is MODEL and MASKED_LM.kind in kinds):  # a masked LM's is not left behind
        head = MASKED_LM if kinds else MODEL
    _read_pairs(folder, kinds)
    bias, types = folder.state.get(LM_BIAS), len(folder.state["token_types"])
    state, values = from_hf(folder)
    classes = classes_of(state, folder.config, folder.head, path)
    saved = SavedModel.of(
        path,
        ROBERTA,
        DEFAULTS | values,
        state,
        _task(folder, len(state.get(CLASSIFIER.shown, ()))),
        kind=f"Hugging Face's {folder.family.name}",
        origin=Origin(
            family=folder.family.name,
            head=head.suffix,
            labels=labels_of(folder.config, classes, folder.notes),
            problem_type=folder.config.get("problem_type"),
            named={key: folder.config[key] for key in NAMED if folder.config.get(key)},
            kept=folder.kept,
            kept_files=sorted(folder.ledger.named("files", KEPT)),
            rows=folder.vocabulary.rows,
        ),
        library=transformers_release(),
        outputs=lambda tokens, segments: _run(folder, kinds, bias, tokens, segments if types > 1 else None),
        files=folder.vocabulary.files,
        texts=folder.vocabulary.made | {DICTIONARY: folder.vocabulary.dictionary()},
        ledger=folder.ledger,
        notes=folder.notes,
        apart=folder.apart,
    )
    state[VERSION] = encode_text(saved.plan.describe())
    saved.kept_files = {name: path / name for name in saved.origin.kept_files}
    return saved


def _read_pairs(folder: Folder, kinds: list[str]) -> None:
    """Leave out the token types that the folder's tokenizer never gives; a form that no model here has is lost."""
    joined, types = folder.vocabulary.pairs, folder.state["token_types"]
    if joined is None:
        return
    joined, notes, apart = compare_ids(folder.path, joined, MASKED_LM.kind in kinds)
    folder.notes += notes
    folder.apart += apart
    absolute = "positions" in folder.state and not folder.family.padded
    if absolute and load_tokenizer(folder.path).carried.get("padding_side") == "left":
        folder.apart.append("texts of a padded batch: transformers pads on the left, and counts positions from there")
    if not joined.segments and len(types) > 1:
        folder.notes.append("its tokenizer gives every token the type 0: the other types are left out")
        folder.state["token_types"] = types[:1]
    if not joined.usual and {CLASSIFIER.kind, CHOICES.kind, SPANS.kind} & {*kinds}:
        folder.ledger.add("files", "of the tokenizer: how it joins two texts")
    if not joined.alone:
        folder.ledger.add("files", "of the tokenizer: the ids of a text")


def _run(folder: Folder, kinds: list[str], bias: Tensor | None, tokens: Tensor, segments: Tensor | None) -> Outputs:
    """Return what transformers computes of tokens (B, T) in fairseq's rows, in fairseq's order of rows."""
    rows = torch.tensor(folder.vocabulary.rows)
    types = torch.zeros_like(tokens) if segments is None else segments
    found = run_in_transformers(folder.path, kinds, bias, rows[tokens], tokens == PADDING, types)
    if "logits" in found:
        found["logits"] = found["logits"][..., rows.clamp(min=0)].masked_fill(rows < 0, 0)
    return found


def from_hf(folder: Folder) -> tuple[State, dict[str, Any]]:
    """Return a folder's tensors under the names of relpos_roberta, and values of RelPosRobertaConfig."""
    config, state = folder.config, dict(folder.state)
    state[EMBEDDING] = folder.vocabulary.take(state[EMBEDDING])
    untied = _lm_head(folder, state)
    more: dict[str, Any] = {}
    if folder.kind == hf_deberta.KIND:
        more = hf_deberta.positions(state, config, KINDS[folder.kind], KINDS["absolute"])
    if "special_ids" in config:  # with an activation of its own
        more["pooler_activation_fn"] = ACTIVATIONS[config.get("pooler_hidden_act", "gelu")]
    pools = folder.family.name.startswith(DISENTANGLED)  # with a dropout of its own
    types = max(len(state["token_types"]), 2)
    segments = _positions(folder, state)
    dropout = config.get("hidden_dropout_prob", 0.1)
    given = hf_deberta.head_dropout(config, folder.notes) if pools else config.get("classifier_dropout")
    values = {
        "position_scheme": KINDS[folder.kind],
        "segment_encoding": segments,
        "encoder_layers": config["num_hidden_layers"],
        "encoder_embed_dim": config["hidden_size"],
        "encoder_ffn_embed_dim": config["intermediate_size"],
        "encoder_attention_heads": config["num_attention_heads"],
        "activation_fn": ACTIVATIONS[config.get("hidden_act", "gelu")],
        "layer_norm_eps": config.get("layer_norm_eps", 1e-12),
        "dropout": dropout,
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        "pooler_dropout": dropout if given is None else given,
        "num_segments": None if segments == "none" else str(types),
        "max_positions": folder.max_positions,
        "untie_weights_roberta": untied,
    } | more
    return state, values


def _task(folder: Folder, classes: int) -> dict[str, Any]:
    """Return options of the task that gives the model's head the input that it was trained on.

    Pairs are joined as the folder's tokenizer joins them, whatever its model: RoBERTa's `<s> A </s> </s> B </s>`
    fairseq's sentence_prediction writes with a separator token, BERT's `<s> A </s> B </s>` without one.
    """
    if classes == 0:
        return {}
    ranks, joined = folder.head is CHOICES, folder.vocabulary.pairs
    two = joined.separators == 1 if joined else folder.family.padded
    if not two:
        folder.notes.append(
            f"pairs have BERT's one </s> between them: {heads.RANKING if ranks else 'sentence_prediction'} without "
            "--separator-token; with --separator-token 2, RoBERTa's two, inputs would differ"
        )
    pairs = {"init_token": 0, "separator_token": 2 if two else None}
    if ranks:
        return pairs | {"_name": heads.RANKING, "ranking_head_name": heads.HEAD}
    return pairs | {
        "_name": "sentence_prediction",
        "classification_head_name": heads.HEAD,
        "regression_target": heads.is_regression(folder.config, classes),
    }


def classes_of(state: State, config: dict[str, Any], head: heads.Head | None, path: Path) -> int:
    """Return the number of outputs of a folder's classifier of texts or tokens; 0: it has none.

    Raises:
        ConversionError: a head has another number of outputs than config.json names classes, or than its kind has.
    """
    outputs = {kind: len(state[name]) for kind, name in SHOWN_BY.items() if name in state}
    classes = outputs.get(CLASSIFIER.kind, outputs.get(TOKENS.kind, 0))
    named = None if head is CHOICES else config.get("id2label")
    if named and classes and len(named) != classes:
        raise ConversionError(
            f"{path}/config.json has id2label {named!r} of {len(named)} names, and the head has {classes} outputs: "
            f"name each of them, or leave id2label out"
        )
    for own, count, what in ((SPANS.kind, 2, "a head of spans"), (CLASSIFIER.kind, 1, "multiple choice")):
        if outputs.get(own, count) != count and (own == SPANS.kind or head is CHOICES):
            raise ConversionError(f"{path}: {what} has {count} outputs, and the tensors have {outputs[own]}")
    return classes


def labels_of(config: dict[str, Any], classes: int, notes: list[str]) -> list[str]:
    """Return the names of `classes` classes where config.json names every one, else nothing; a note may say why."""
    named = config.get("id2label") or {}
    labels = [named.get(str(number), "").strip() for number in range(classes)]
    if any(name.startswith("LABEL_") for name in labels):
        return []
    if any(labels) and (not all(labels) or len(set(labels)) < len(labels)):
        notes.append(f"classes are named LABEL_0, LABEL_1, ...: of {labels!r} one is empty or there twice")
        return []
    return labels if all(labels) else []


def _lm_head(folder: Folder, state: State) -> bool:
    """Put the masked LM's head into fairseq's order of rows, or add one, in place; return whether it is untied."""
    embedding = state[EMBEDDING]
    if SHOWN_BY[MASKED_LM.kind] not in state:
        folder.notes.append("no masked LM head: one is added, untrained (identity, no bias)")
        width = embedding.size(1)
        state["encoder.lm_head.dense.weight"] = torch.eye(width, dtype=embedding.dtype)
        state["encoder.lm_head.layer_norm.weight"] = embedding.new_ones(width)
        for name in ("dense", "layer_norm"):
            state[f"encoder.lm_head.{name}.bias"] = embedding.new_zeros(width)
        state[LM_WEIGHT], state[LM_BIAS] = embedding, embedding.new_zeros(len(embedding))
        return False
    state.setdefault(LM_BIAS, embedding.new_zeros(len(folder.state[EMBEDDING])))  # as the library begins it
    state |= {name: folder.vocabulary.take(state[name]) for name in (LM_WEIGHT, LM_BIAS) if name in state}
    state.setdefault(LM_WEIGHT, embedding)
    return not folder.tied


def _positions(folder: Folder, state: State) -> str:
    """Make the position tables in `state`; return the segment encoding that expresses the token types."""
    types, shared = state.pop("token_types"), f"{ENCODER}.positions.shared"
    single, index = len(types) == 1, 0
    if folder.kind == "absolute":
        before, table = state["positions"][: folder.offset], state.pop("positions")[folder.offset :]
        if before.any():
            folder.notes.append(
                f"{len(before)} rows before position 0, of padding, change no output: they go back as 0"
            )
        if single:
            if types.any():
                folder.notes.append("the only token type is added to the position table")
            table = table + types
        state[f"{shared}.0.table"], index = table, 1
    elif folder.kind == hf_deberta.KIND:
        index = int(f"{shared}.0.table" in state)
    else:
        (name,) = scheme_class(KINDS[folder.kind]).tables
        for layer in range(folder.config["num_hidden_layers"]):
            table = state.pop(f"distances.{layer}").flip(0)[None]  # i - j to j - i
            state[f"{ENCODER}.layers.{layer}.self_attn.position.0.{name}"] = table
    if single and (folder.kind == "absolute" or not types.any()):
        return "none"
    state[f"{shared}.{index}.table"] = types.expand(max(len(types), 2), -1)
    return "input"
