"""Import a `model.pt` of Transformer-XL's original PyTorch code (Dai2019) as a `relpos_transformer_xl`.

The file is the whole module as torch.save pickles it, or its state_dict:

    word_emb.emb_layers.i.weight, emb_projs.i         bands of the (adaptive) embedding
    layers.n.dec_attn.{qkv_net, o_net, layer_norm}    r_net too where attn_type is 0; q_net and
                                                      kv_net for qkv_net where it is 2 or 3
    layers.n.pos_ff.{CoreNet.0, CoreNet.3, layer_norm}
    r_w_bias, r_r_bias (0);  r_emb, r_w_bias, r_bias (1);  r_emb (3)
    crit.out_layers.i, out_projs.i, cluster_{weight, bias}

`attn_type` 0 is the paper's attention, 1 learns vectors and scalars of distances instead; 2 and 3 add absolute
positions to layers' inputs and, anew in every segment, to memory (`models/memory_positions.py`).

Types that fairseq's dictionary adds have no embedding and so low a bias that their probability is 0. Embedding and
adaptive softmax are no longer tied: fairseq has no projection between a tied first band and the outputs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError, never_run
from relpos_fairseq.formats.names import TRANSFORMER_XL, matching
from relpos_fairseq.formats.pickles import UnknownObject, safe_unpickle, tensors_of
from relpos_fairseq.formats.vocabulary import NEVER, Vocabulary, order_words, take_rows
from relpos_fairseq.io.reading import read_text
from relpos_fairseq.io.tensor_files import check_tensors
from relpos_fairseq.models.building import build_generating, load_tensors
from relpos_fairseq.models.memory_positions import KINDS
from relpos_fairseq.saved.checkpoint import OURS
from relpos_fairseq.saved.ledger import NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.schemes import named_elsewhere
from relpos_fairseq.text.dictionary import SPECIAL

MARKS = (b"word_emb", b"emb_layers", b"dec_attn")  # names in a pickle of either kind
HEAD = 1 << 22  # bytes that hold names; numbers follow them
NAME = "relpos_transformer_xl"  # of the model that it becomes
BUFFERS = ("version", "_float_tensor")
CACHE, TEXT = "cache.pt", "vocab.txt"
_WHOLE = "give the whole module, as its train.py saves it"


@dataclass(frozen=True)
class OriginalXL:
    """A model of the original code: its tensors, and options that the tensors do not show.

    Attributes:
        path: its file.
        state: tensors under the original names.
        heads: attention heads.
        attn_type: 0 to 3.
        cutoffs: of the adaptive softmax, without the number of types; empty: a plain one.
        mem_len: most states that it remembers; None: the file does not say.
        segment: tokens of a segment; None: the file does not say.
        clamp_len: distances beyond it read the same row or sinusoid; 0: none.
        same_length: every token sees mem_len tokens.
        pre_norm: layer norm before blocks (pre_lnorm).
        dropout: probability, of attention's probabilities dropatt.
        notes: what a state_dict does not say, and is taken to be.
        said: attributes of the module; none in a state_dict.
    """

    path: Path
    state: Recorded
    heads: int
    attn_type: int
    cutoffs: tuple[int, ...] = ()
    mem_len: int | None = None
    segment: int | None = None
    clamp_len: int = 0
    same_length: bool = False
    pre_norm: bool = False
    dropout: tuple[float, float] = (0.1, 0.0)
    notes: list[str] = field(default_factory=list)
    said: Recorded = field(default_factory=Recorded)

    @property
    def absolute(self) -> bool:
        """Whether absolute positions are added to memory and segment."""
        return self.attn_type > 1

    @property
    def layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.state if name[:7] == "layers.")

    @property
    def reach(self) -> int:
        """Number of tokens of segment and memory together."""
        return (self.segment or 0) + (self.mem_len or 0)

    @property
    def width(self) -> int:
        return len(self.state["layers.0.dec_attn.o_net.weight"])

    @property
    def bands(self) -> list[tuple[int, int]]:
        """First type and the one after the last of each band of the softmax."""
        ends = [0, *self.cutoffs, self.types]
        return list(zip(ends, ends[1:], strict=False))

    def band_width(self, number: int) -> int:
        tables = embeddings(self.state)
        return tables[number if len(tables) > 1 else 0].size(1)

    @property
    def types(self) -> int:
        return sum(map(len, embeddings(self.state)))


def embeddings(state: dict[str, Tensor]) -> list[Tensor]:
    """Return the embeddings of all bands, or the one that they have in common."""
    names = (f"word_emb.emb_layers.{number}.weight" for number in range(len(state)))
    return [state[name] for name in names if name in state]


def is_original_xl(path: Path) -> bool:
    """Tell whether a file's pickle names the original model's tensors; nothing is unpickled."""
    if not path.is_file():
        return False
    with path.open("rb") as file:  # torch compresses no file of its archives
        head = file.read(HEAD)
    return all(mark in head for mark in MARKS)


def read_original_xl(path: Path, _: dict[str, Any], data: Path | None) -> SavedModel:
    """Read a `model.pt` of the original code as a `relpos_transformer_xl`.

    Args:
        path: the file.
        data: folder of cache.pt or vocab.txt; None: the file's own.

    Raises:
        ConversionError: the file is truncated, or of a kind that is not converted, or its vocabulary is missing.
    """
    original = _read_model(path)
    vocabulary = read_vocabulary(data or path.parent, original.types)
    values, rows = xl_values(original, vocabulary), (len(vocabulary.rows),) * 2
    model = build_generating(NAME, values, rows)
    state = {name: part for name, part in model.state_dict().items() if name.endswith(BUFFERS)}
    load_tensors(model, state | xl_state(original, vocabulary), original.state["layers.0.dec_attn.o_net.weight"].dtype)
    loss = "adaptive_loss" if values.get("adaptive_input") else "cross_entropy"
    made = SavedModel.of(
        path,
        NAME,
        values,
        model.state_dict(),
        {"_name": OURS[NAME].task, "tokens_per_sample": values["tokens_per_sample"]},
        kind="released Transformer-XL",
        outputs=never_run(
            "relpos runs no code of Transformer-XL's original repository; evaluate the result on its data"
        ),
        texts={"dict.txt": vocabulary.dictionary()},
        notes=original.notes,
        ledger=_ledger(original),
    )
    made.checkpoint["cfg"]["criterion"] = {"_name": loss, "sentence_avg": False}
    return made


# Attributes of the module, and tensors, that say nothing here, by the reason why.
_NEUTRAL = {
    "the tensors say it": "n_token d_embed d_model d_head n_layer div_val max_klen",
    "of training": "training dump_patches sample_softmax tie_weight",
    "states beyond the segment, which the original's evaluation sets": "ext_len",
}
_BUFFERS = {
    "pos_emb.inv_freq": "frequencies of sinusoids, which are made anew",
    "layers.#.dec_attn.r_w_bias": "repeats r_w_bias",
    "layers.#.dec_attn.r_r_bias": "repeats r_r_bias",
}


def _ledger(original: OriginalXL) -> Ledger:
    """Return what became of a model whose tensors and attributes have been read."""
    ledger = Ledger(original.state, original.said, [original.path.name])
    ledger.mark("files", USED, [original.path.name])
    ledger.mark("keys", NEUTRAL, [name for name in original.said if name.startswith("_")], "of torch's module")
    ledger.mark_neutral(_NEUTRAL)
    for name in original.state.keys() - original.state.read:
        if template := matching(name, _BUFFERS):
            ledger.mark("tensors", NEUTRAL, [name], _BUFFERS[template])
    ledger.mark("tensors", USED, original.state.read)
    return ledger


def _read_model(path: Path) -> OriginalXL:
    """Read an original model without running its code.

    Raises:
        ConversionError: it is truncated, or of a kind that is not converted.
    """
    found = safe_unpickle(path)
    while not isinstance(found, dict) and "module" in getattr(found, "_modules", {}):
        found = found._modules["module"]  # as FP16_Module and DataParallel wrap it
    try:
        if isinstance(found, dict):
            found = {name.removeprefix("module."): value for name, value in found.items()}
            original = _of_state(path, found)
        else:
            original = _of_module(path, found)
        _check(original)
    except (KeyError, AttributeError, TypeError) as error:
        raise ConversionError(
            f"{path} is no whole released Transformer-XL ({error}): give the model.pt of its train.py"
        ) from None
    return original


def _of_module(path: Path, module: Any) -> OriginalXL:
    state = Recorded(tensors_of(module))
    said = Recorded({name: v for name, v in vars(module).items() if isinstance(v, int | float | str | None)})
    crit, layers = module._modules.get("crit"), module._modules["layers"]._modules
    attention = layers["0"]._modules["dec_attn"]
    return OriginalXL(
        path=path,
        state=state,
        heads=int(said["n_head"]),
        attn_type=int(said.get("attn_type", 0)),
        cutoffs=tuple(getattr(crit, "cutoffs", ()))[:-1],
        mem_len=int(said.get("mem_len") or 0),
        segment=int(said.get("tgt_len") or 0) or None,
        clamp_len=max(int(said.get("clamp_len") or 0), 0),
        same_length=bool(said.get("same_length")),
        pre_norm=bool(getattr(attention, "pre_lnorm", False)),
        dropout=(float(module._modules["drop"].p), float(attention._modules["dropatt"].p)),
        said=said,
    )


def _of_state(path: Path, state: dict[str, Any]) -> OriginalXL:
    kind = 0 if "r_r_bias" in state else 1 if "r_bias" in state else 3 if "r_emb" in state else 2
    tensors = Recorded({name: value for name, value in state.items() if isinstance(value, Tensor)})
    cutoffs = tuple(itertools.accumulate(map(len, embeddings(tensors))))[:-1]
    if not cutoffs and "crit.cluster_weight" in tensors:
        raise ConversionError(f"{path}: a state_dict does not say its cut-offs: {_WHOLE}")
    note = "a state_dict says neither memory, clamp_len, same_length nor pre_lnorm: none is taken"
    heads = tensors["r_w_bias"].size(-2) if "r_w_bias" in tensors else 1
    return OriginalXL(path, tensors, heads, kind, cutoffs, notes=[f"{note} ({_WHOLE})"])


def _check(original: OriginalXL) -> None:
    """Raise an error if the model has a part that cannot be converted.

    Raises:
        ConversionError: names the file and why.
    """
    path, state = original.path, original.state
    check_tensors(state, path, ConversionError)
    if not embeddings(state) or "crit.out_layers.0.bias" not in state:
        raise KeyError("its embedding or crit.out_layers")
    refused = ""
    if original.absolute and not original.segment:
        refused = f"does not say its segment and memory, which its positions need: {_WHOLE}"
    elif original.absolute and original.pre_norm:
        refused = (
            "has pre_lnorm, under which its queries, unlike its keys and values, read the layer's "
            "input without layer norm: give a model without"
        )
    elif original.attn_type == 2 and 0 < original.clamp_len < original.reach - 1:
        refused = (
            f"clamps positions at {original.clamp_len}, short of its segment and memory of "
            f"{original.reach}: give a model without clamp_len"
        )
    if refused:
        raise ConversionError(f"{path} has attn_type {original.attn_type} and {refused}")
    width, inner = state["layers.0.dec_attn.o_net.weight"].shape
    if width != inner:
        raise ConversionError(
            f"{path}: {original.heads} heads of {inner // original.heads} are {inner} channels, "
            f"and the model has {width}: ours divides the width among the heads"
        )


def read_vocabulary(folder: Path, types: int) -> Vocabulary:
    """Read the vocabulary from `cache.pt`, which the original code keeps beside its data, or from `vocab.txt`.

    Raises:
        ConversionError: there is none, or it has not as many types as the model.
    """
    path = next((folder / n for n in (CACHE, TEXT) if (folder / n).is_file()), None)
    if path is None:
        raise ConversionError(
            f"{folder} has neither {CACHE} nor {TEXT}: give --data, the folder of the data that "
            f"the model was trained on ({CACHE}: the released code's; {TEXT}: a type a line)"
        )
    if path.name == TEXT:
        symbols = read_text(path, "a vocabulary").split("\n")
        symbols = symbols[:-1] if not symbols[-1] else symbols
    else:
        corpus = safe_unpickle(path, "corpus of the released code")
        inner = getattr(corpus, "vocab", None)
        symbols = getattr(inner, "idx2sym", None) if isinstance(inner, UnknownObject) else None
        if not isinstance(symbols, list):
            raise ConversionError(f"{path} holds no vocabulary of the released code")
    symbols = [str(symbol) for symbol in symbols]
    special: dict[str, str | None] = dict.fromkeys(SPECIAL)
    for name, theirs in (("</s>", ("<eos>",)), ("<unk>", ("<unk>", "<UNK>"))):  # the first that there is
        special[name] = next((one for one in theirs if one in symbols), None)
    return order_words(symbols, types, special, str(path), cut_at_spaces=True)


def xl_values(original: OriginalXL, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the values of RelPosTransformerXLConfig, and the task's `tokens_per_sample`."""
    state, width = original.state, original.width
    values = {
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": len(state["layers.0.pos_ff.CoreNet.0.weight"]),
        "decoder_layers": original.layers,
        "decoder_attention_heads": original.heads,
        "decoder_normalize_before": original.pre_norm,
        "no_decoder_final_norm": True,
        "no_attention_bias": True,
        "output_bias": True,
        "dropout": original.dropout[0],
        "activation_dropout": original.dropout[0],
        "attention_dropout": original.dropout[1],
        "mem_len": original.mem_len or 0,
        "same_length": original.same_length,
        "tokens_per_sample": original.segment or 128,  # a state_dict says neither this nor mem_len
    }
    if original.absolute:
        values |= {"position_scheme": "none", "window_positions": KINDS[original.attn_type - 1]}
    else:
        values["position_scheme"] = named_elsewhere("transformer-xl")[f"attn_type {original.attn_type}"]
    if original.attn_type == 0:
        values |= {"position_query_bias": "shared", "clamp_len": str(original.clamp_len)}
    elif original.attn_type == 1:
        values["position_clip_distance"] = str(_clip_distance(original))
    first = embeddings(state)[0].size(1)
    if not original.cutoffs:
        tied = torch.equal(embeddings(state)[0], state["crit.out_layers.0.weight"])
        sizes = {"decoder_input_dim": first, "decoder_output_dim": first}
        return values | sizes | {"share_decoder_input_output_embed": tied}
    cutoffs = ",".join(str(end + vocabulary.rows.count(-1)) for end in original.cutoffs)
    values |= {"adaptive_input": True, "decoder_input_dim": first}
    values |= {f"adaptive_{side}_cutoff": cutoffs for side in ("input", "softmax")}
    sides = (("input", first), ("softmax", width))
    return values | {f"adaptive_{side}_factor": _factor(original, widest) for side, widest in sides}


def _factor(original: OriginalXL, width: int) -> float:
    """Return the largest factor by which widths may fall from band to band, beginning with `width`, and hold all bands.

    Raises:
        ConversionError: a band is wider than `width`.
    """
    bands = [original.band_width(number) for number in range(1, len(original.bands))]
    for factor in range(width, 0, -1):
        if all(width // factor ** (n + 1) >= band for n, band in enumerate(bands)):
            return float(factor)
    raise ConversionError(f"{original.path}: bands of its vocabulary are {bands} wide, and ours at most {width}")


def _clip_distance(original: OriginalXL) -> int:
    """Return the distance at and beyond which the learned table has a single row."""
    rows = original.state["r_emb"].size(1)
    reach = (min(rows, original.clamp_len) if original.clamp_len else rows) - 1
    if reach < 1:
        raise ConversionError(f"{original.path}: its table has one distance alone")
    return reach


def xl_state(original: OriginalXL, vocabulary: Vocabulary) -> State:
    """Return the tensors under the names of relpos_transformer_xl, without buffers of positions.

    Raises:
        ConversionError: the end of a line or the unknown word stands behind the first band.
    """
    if any(row >= original.bands[0][1] for row in vocabulary.rows[:4]):
        raise ConversionError(f"{original.path}: <eos> and <unk> must lie in the first band")
    found = {ours: original.state[name] for name in original.state if (ours := TRANSFORMER_XL.ours(name))}
    names = ("q_net", "kv_net") if original.absolute else ("qkv_net",)
    for layer in range(original.layers):
        target = f"decoder.layers.{layer}."
        parts = torch.cat([original.state[f"layers.{layer}.dec_attn.{name}.weight"] for name in names]).chunk(3)
        found |= {f"{target}self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        if original.absolute:
            continue
        place = f"{target}self_attn.position.0."
        found |= {place + name: value for name, value in _positions(original, layer).items()}
    if original.attn_type == 3:
        rows = original.state["r_emb"].flatten(2)  # (layers, max_klen, width)
        found["decoder.window.table"] = rows[:, rows.size(1) - original.reach :]
    words = _adaptive if original.cutoffs else _plain
    return {name: value.clone() for name, value in (found | words(original, vocabulary)).items()}


def _positions(original: OriginalXL, layer: int) -> State:
    state = original.state
    if original.attn_type == 0:
        return {
            "projection": state[f"layers.{layer}.dec_attn.r_net.weight"],
            "content_bias": state["r_w_bias"],
            "position_bias": state["r_r_bias"],
        }
    reach = _clip_distance(original)  # distances reach .. 0; those of future keys are never read
    vectors = state["r_emb"][layer, -reach - 1 :].transpose(0, 1)  # (H, reach + 1, D)
    scalars = state["r_bias"][layer, -reach - 1 :].t()
    return {
        "key_table": pad(vectors, (0, 0, 0, reach)),
        "content_bias": state["r_w_bias"][layer],
        "bias_table": pad(scalars, (0, reach)),
    }


def _plain(original: OriginalXL, vocabulary: Vocabulary) -> State:
    state, rows = original.state, vocabulary.rows
    found = {
        "decoder.embed_tokens.weight": take_rows(embeddings(state)[0], rows),
        "decoder.output_projection.weight": take_rows(state["crit.out_layers.0.weight"], rows),
        "decoder.output_projection.bias": take_rows(state["crit.out_layers.0.bias"], rows, NEVER),
    }
    if "word_emb.emb_projs.0" in state:
        found["decoder.project_in_dim.weight"] = state["word_emb.emb_projs.0"]
        found["decoder.project_out_dim.weight"] = state["crit.out_projs.0"].t()
    return found


def _adaptive(original: OriginalXL, vocabulary: Vocabulary) -> State:
    state, found = original.state, {}
    bands = [vocabulary.rows[: original.cutoffs[0] + vocabulary.rows.count(-1)]]
    bands += [list(range(start, end)) for start, end in original.bands[1:]]
    eye = torch.eye(original.width, dtype=state["crit.cluster_weight"].dtype)
    first = embeddings(state)[0].size(1)
    factors = [(width, int(_factor(original, width))) for width in (first, original.width)]
    for number, (band, (start, end)) in enumerate(zip(bands, original.bands, strict=True)):
        single = "crit.out_layers.1.weight" not in state
        own, offset = (0, start) if single else (number, 0)
        local = [row - start if row >= 0 else -1 for row in band]
        take = slice(offset, offset + end - start)
        # Where the bands here are wider than the original ones, the added channels are 0.
        entering, leaving = ((0, width // factor**number - original.band_width(number)) for width, factor in factors)
        embedding = state[f"word_emb.emb_layers.{own}.weight"][take]
        spread = state.get(f"word_emb.emb_projs.{own}", eye)  # (width, d)
        place = f"decoder.embed_tokens.embeddings.{number}."
        found[f"{place}0.weight"] = pad(take_rows(embedding, local), entering)
        found[f"{place}1.weight"] = pad(spread, entering)
        weight = take_rows(state[f"crit.out_layers.{own}.weight"][take], local)
        bias = take_rows(state[f"crit.out_layers.{own}.bias"][take], local, NEVER)
        inner = state.get(f"crit.out_projs.{number}", eye).t()  # (d, width)
        if number == 0:
            # The original code gives band i the i-th column from the end.
            weight = torch.cat([weight, state["crit.cluster_weight"].flip(0)]) @ inner
            bias = torch.cat([bias, state["crit.cluster_bias"].flip(0)])
            found["decoder.adaptive_softmax.head.0.weight"] = weight
            found["decoder.adaptive_softmax.head.1.bias"] = bias
            continue
        place = f"decoder.adaptive_softmax.tail.{number - 1}."
        found[f"{place}0.weight"] = pad(inner, (0, 0, *leaving))
        found |= {f"{place}2.weight": pad(weight, leaving), f"{place}3.bias": bias}
    return found
