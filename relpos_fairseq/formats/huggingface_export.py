"""Write a relpos_roberta as a Hugging Face BERT or RoBERTa, if their architecture can express the model.

    our scheme     their position_embedding_type
    learned        absolute
    shaw_keys      relative_key         E_{i-j} = a_{-(i-j)}, for distances below max_position_embeddings
    m4             relative_key_query   the same

Any other scheme is exported if `convert` turns it into one of these three without loss.  All heads share a table there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from relpos_fairseq import heads
from relpos_fairseq.conversion.algebra import convert
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError, Outputs, Probe
from relpos_fairseq.core.config import OPTIONS
from relpos_fairseq.core.options import CLIP_DISTANCE, SHARE
from relpos_fairseq.core.scheme import PositionScheme
from relpos_fairseq.formats.closing_check import PAIR, NotOpenedError, check_folder
from relpos_fairseq.formats.huggingface_folder import ACTIVATIONS, FAMILIES, LM_BIAS, LM_WEIGHT, SCHEMES, Family
from relpos_fairseq.formats.huggingface_import import EMBEDDING
from relpos_fairseq.formats.in_transformers import run_in_transformers
from relpos_fairseq.formats.names import NEXT_SENTENCE, Names, matching
from relpos_fairseq.formats.vocabulary import Vocabulary, of_checkpoint, symbols_of, tokenizer_place
from relpos_fairseq.heads import CHOICES, CLASSIFIER, MASKED_LM, MODEL, SPANS, TOKENS, Head, OwnHead
from relpos_fairseq.saved.identity import plan_of
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.schemes import scheme_class
from relpos_fairseq.text import MASK, SPECIAL
from relpos_fairseq.text.assets import Text, TokenizerText
from relpos_fairseq.text.dictionary import BOS, EOS, UNKNOWN
from relpos_fairseq.text.folders import SETTINGS
from relpos_fairseq.text.tokenizer import Pairs
from relpos_fairseq.text.transformers_files import tried_ids


def to_hf(
    source: SavedModel, family_name: str, vocabulary: Vocabulary, head: OwnHead | None
) -> tuple[dict[str, Any], dict[str, Tensor], ConversionReport]:
    """Return config.json, tensors and a conversion report of a Hugging Face model that computes what `source` does.

    Args:
        source: the relpos_roberta.
        family_name: `bert` or `roberta`.
        vocabulary: the order of the embedding's rows in the Hugging Face model.
        head: the one of its heads that is exported; None: the masked LM head.

    Raises:
        ConversionError: Hugging Face's architecture cannot express the model.
    """
    family = FAMILIES[family_name]
    _check(source, family)
    scheme, state, report = _expressible(source)
    kind, kept = _take_head(source, state, family, head, report)
    inner = source.values.get("pooler_activation_fn", "tanh")
    if kind in (CLASSIFIER, CHOICES) and inner != "tanh":
        raise ConversionError(
            f"Hugging Face's {family_name} cannot express a classifier with {inner} after its first layer: relpos "
            f"export transformers can"
        )
    for name in (EMBEDDING, LM_WEIGHT, LM_BIAS):
        if name in state:
            state[name] = vocabulary.put(state[name])
    offset = vocabulary.rows[1] + 1 if family.padded else 0  # RoBERTa's first position is row pad_token_id + 1
    length = _positions(scheme, state, source, family, offset)
    names = Names(family.rows | family.tables | family.classifier(kind))
    weights = {
        family.whole(names.theirs(ours)): value for ours, value in state.items() if not ours.endswith("version")
    } | kept
    config = _config(source, family, vocabulary)
    config |= {
        "architectures": [family.stem + kind.suffix],
        "position_embedding_type": scheme.elsewhere["transformers"],
        "max_position_embeddings": length,
        "type_vocab_size": len(state["token_types"]),
    }
    if kind in (CLASSIFIER, TOKENS):
        config |= classes_said(source, kind, len(state[kind.shown]))
    return config, weights, report


def _check(source: SavedModel, family: Family) -> None:
    """Raise an error if a relpos_roberta has a part that Hugging Face's family lacks.

    Raises:
        ConversionError: names the part.
    """
    values = source.values
    refusals = (
        (values.get("encoder_normalize_before"), "layer norms before each block"),
        (values.get("no_layernorm_embedding"), "no layer norm of the embeddings"),
        (values["activation_fn"] not in ACTIVATIONS.values(), f"activation {values['activation_fn']}"),
        (
            family.name != "bert" and values["activation_fn"] != "gelu",
            f"activation {values['activation_fn']} in RoBERTa's LM head (--to hf-bert can)",
        ),
        (values.get("segment_encoding") == "head", "segments a head"),
    )
    for refused, what in refusals:
        if refused:
            raise ConversionError(f"Hugging Face's {family.name} cannot express {what}")


def _expressible(source: SavedModel) -> tuple[type[PositionScheme], State, ConversionReport]:
    """Convert `source` to the first of Hugging Face's schemes (`SCHEMES`) that expresses it without loss.

    Returns:
        That scheme, the converted state dict, and the report of the conversion.

    Raises:
        ConversionError: none of the schemes expresses the model.
    """
    reasons, theirs = [], {CLIP_DISTANCE: "0", SHARE: "heads"}
    for scheme in map(scheme_class, SCHEMES.values()):
        values = source.values | {
            option.field: theirs.get(option) if option in scheme.takes else None for option in OPTIONS
        }
        values["position_scheme"] = scheme.name
        target = plan_of(values)
        try:
            done = convert(source.state, source.plan, target)
        except NotExactError as error:
            reasons.append(str(error).split(". Convert")[0])
            continue
        return scheme, dict(done.state), done.report
    kinds = ", ".join(f"{kind} ({name})" for kind, name in SCHEMES.items())
    raise ConversionError(f"Hugging Face's BERT and RoBERTa have {kinds} alone: {'; '.join(reasons)}")


def _positions(scheme: type[PositionScheme], state: State, source: SavedModel, family: Family, offset: int) -> int:
    """Make Hugging Face's tables of positions and token types in `state`; return max_position_embeddings.

    A table of absolute positions gets `offset` rows of zeros before its first.
    """
    shared, (name,) = f"{ENCODER}.positions.shared", scheme.tables
    length, width = int(source.values["max_positions"]), state[EMBEDDING].size(1)
    if scheme.has_position_table():
        table = state.pop(f"{shared}.0.{name}")
        length += offset
        state["positions"] = torch.cat([table.new_zeros(offset, width), table])
    else:
        for layer in range(source.values["encoder_layers"]):
            table = state.pop(f"{ENCODER}.layers.{layer}.self_attn.position.0.{name}")
            state[f"distances.{layer}"] = table[0].flip(0).contiguous()
        state["positions"] = state[EMBEDDING].new_zeros(length, width)
    types = state.pop(f"{shared}.{int(scheme.has_position_table())}.table", None)
    if types is None:
        had = source.origin.named.get("type_vocab_size") if family.name == source.origin.family else None
        types = state[EMBEDDING].new_zeros(had or (2 if family.name == "bert" else 1), width)
    elif family.name != "bert" and bool((types == types[:1]).all()):
        types = types[:1].clone()
    state["token_types"] = types
    return length


def chosen_head(source: SavedModel, wanted: str | None) -> OwnHead | None:
    """Return the head of that name, or that with which a folder was read, for the way back; None: the masked LM's.

    Raises:
        ConversionError: the model has no head of that name.
    """
    found = {one.called: one for one in source.heads}
    if wanted is not None and wanted not in found:
        raise ConversionError(f"--head {wanted}: the model has {', '.join(found) or 'no head but the masked LM'}")
    mine = [one for one in source.heads if one.head.suffix == source.origin.head]
    return found[wanted] if wanted else mine[0] if len(mine) == 1 else None


def _take_head(
    source: SavedModel, state: State, family: Family, head: OwnHead | None, report: ConversionReport
) -> tuple[Head, dict[str, Tensor]]:
    """Leave one head in `state`, under the name that the library's has here.

    Without a head, this is the masked LM head, or what the source was before it was converted.

    Returns:
        The kind of the head, and tensors by the library's names that the source keeps for it.
    """
    starts = tuple(one.prefix for one in source.heads)
    taken = {name: state.pop(name) for name in list(state) if name.startswith(starts)}
    same = source.origin.family in FAMILIES and FAMILIES[source.origin.family].prefix == family.prefix
    kept = {name: value.clone() for name, value in source.origin.kept.items()} if same else {}
    if not same:
        report.dropped += [f"tensor {name}: {family.name} has none" for name in source.origin.kept]
    left = sorted(one.called for one in source.heads if one != head)
    report.dropped += [f"head {name}: --head {name} exports it" for name in left]
    if head is None:
        if not (same and source.origin.head == MODEL.suffix):
            return heads.PRE_TRAINING if any(matching(name, [NEXT_SENTENCE]) for name in kept) else MASKED_LM, kept
    for name in [name for name in state if name.startswith("encoder.lm_head.")]:
        del state[name]
    if head is None:
        return MODEL, kept
    report.step("the masked LM head is left out")
    kind, mine = head.head, head.prefix
    state |= {kind.prefix + name.removeprefix(mine): value for name, value in taken.items() if name.startswith(mine)}
    made = Names(family.classifier(kind))
    return kind, {name: value for name, value in kept.items() if made.ours(family.plain(name)) is None}


def classes_said(source: SavedModel, kind: Head, classes: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return what config.json says of a classifier with so many outputs: its problem, and the names of its classes.

    Args:
        source: the relpos_roberta.
        kind: the classifier.
        classes: its outputs.
        names: of the classes, where the source does not name them; as many, or none.
    """
    problem = problem_of(source, classes) if kind is CLASSIFIER else None
    said = {"problem_type": problem} if problem else {}
    named = source.origin.named
    if len(named.get("id2label", ())) == classes:
        return said | {key: named[key] for key in ("id2label", "label2id") if key in named}
    names = source.origin.labels if len(source.origin.labels) == classes else names
    names = names or [f"LABEL_{number}" for number in range(classes)]
    return said | {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _config(source: SavedModel, family: Family, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the entries of config.json that depend neither on the head nor on positions."""
    values = source.values
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    rows = dict(zip((*SPECIAL, MASK), (*vocabulary.rows[:4], vocabulary.rows[-1]), strict=True))
    return {
        "model_type": family.name,
        "vocab_size": max(vocabulary.rows) + 1,
        "hidden_size": values["encoder_embed_dim"],
        "num_hidden_layers": values["encoder_layers"],
        "num_attention_heads": values["encoder_attention_heads"],
        "intermediate_size": values["encoder_ffn_embed_dim"],
        "hidden_act": theirs[values["activation_fn"]],
        "hidden_dropout_prob": values.get("dropout", 0.1),
        "attention_probs_dropout_prob": values.get("attention_dropout", 0.1),
        "classifier_dropout": values.get("pooler_dropout", 0.0),
        "layer_norm_eps": values["layer_norm_eps"],
        "pad_token_id": rows["<pad>"],
        "bos_token_id": rows["<s>"],
        "eos_token_id": rows["</s>"],
        "tie_word_embeddings": not values.get("untie_weights_roberta"),
    }


def save_hf(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder."""
    from safetensors.torch import save_file

    tensors = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    if config["tie_word_embeddings"]:
        for name in ("cls.predictions.decoder.weight", "lm_head.decoder.weight"):
            tensors.pop(name, None)
    for name in ("cls.predictions.bias", "lm_head.bias"):
        if name in tensors:  # transformers' release decides which name it reads
            tensors[name.replace("bias", "decoder.bias")] = tensors[name].clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def problem_of(source: SavedModel, classes: int) -> str | None:
    """Return transformers' problem_type of a classifier; None: transformers decides, as in the folder that it was."""
    regression = classes == 1 or source.task.get("regression_target")
    return source.origin.problem_type or (heads.REGRESSION if regression and not source.origin.head else None)


def separators_of(task: dict[str, Any]) -> int | None:
    """Return the number of further </s> between the texts of a pair, 0 or 1, from a task's options; None: not said."""
    if task.get("_name") in ("sentence_prediction", heads.RANKING):
        return int(task.get("separator_token") is not None)
    return int(task["separators"]) - 1 if task.get("separators") in ("1", "2") else None


def pairs_of(source: SavedModel, text: Text | None) -> int:
    """Return the number of further </s> between two texts, as the task says, or else the tokenizer of the text."""
    if (said := separators_of(source.task)) is not None:
        return said
    return text.tokenizer.pairs.separators if isinstance(text, TokenizerText) else 1


def export_order(source: SavedModel) -> Vocabulary:
    """Return the order that the embedding's rows get in the Hugging Face model of a relpos_roberta.

    A model that was converted to relpos_roberta gets back the order that it had before; for others see
    `of_checkpoint`.
    """
    segments, longest = source.plan.segment_encoding == "input", int(source.values["max_positions"])
    return of_checkpoint(source.files, source.rows, source.origin.rows, separators_of(source.task), segments, longest)


def outputs_of_folder(
    folder: Path,
    kind: Head,
    weights: dict[str, Tensor],
    source: SavedModel,
    vocabulary: Vocabulary,
    probe: Probe,
    chosen: str | None = None,
) -> tuple[Outputs, Outputs]:
    """Run a relpos_roberta and the Hugging Face model exported from it on one input; return the outputs of both.

    Args:
        folder: the folder of the Hugging Face model.
        kind: its head.
        weights: its tensors.
        source: the relpos_roberta.
        vocabulary: the Hugging Face model's id of each row of fairseq's dictionary.
        probe: the input.
        chosen: our name of the head, where there are several.

    Returns:
        Outputs of the relpos_roberta and of the Hugging Face model, under the same names.  Logits are in the order
        of fairseq's dictionary, without rows that the Hugging Face model lacks.

    Raises:
        NotComparedError: transformers cannot run the folder on this machine.
    """
    rows = torch.tensor(vocabulary.rows)
    types = probe.segments
    single = any(len(value) == 1 for name, value in weights.items() if "token_type_embeddings" in name)
    if types is None or single:
        types = torch.zeros_like(probe.tokens)
    bias = next((value for name, value in weights.items() if name in ("cls.predictions.bias", "lm_head.bias")), None)
    after = run_in_transformers(folder, [kind.kind], bias, rows[probe.tokens], ~probe.real, types)
    before = source.outputs(probe.tokens, probe.segments)
    if "logits" in after:
        before["logits"] = before["logits"][..., rows >= 0]
        after["logits"] = after["logits"][..., rows[rows >= 0]]
    # Where there are several heads, our names of outputs also name the head.
    names = {name: name if name in before else f"{name} {chosen}" for name in after}
    return before, {names[name]: value for name, value in after.items()}


def check_written(
    folder: Path,
    source: SavedModel,
    head: Head,
    config: dict[str, Any],
    numbers: list[int],
    longest: int | None,
    chosen: str | None = None,
    trust: bool = False,
    own: Text | None = None,
) -> str:
    """Open a folder that was written of a RoBERTa, in a process of its own; return what was compared.

    Args:
        folder: the folder.
        source: the relpos_roberta.
        head: the head that it was written with.
        config: its config.json.
        numbers: its id of each of our rows; -1: it has none.
        longest: longest input of the model in tokens; None: any.
        chosen: our name of the head, where there are several.
        trust: whether it is loaded by this package's classes.
        own: its text, of such a folder; None: it has none.

    Raises:
        ConversionError: it does not load, or differs from ours.
    """
    names = [name for _, name in sorted((int(n), name) for n, name in config.get("id2label", {}).items())]
    names = names if head in (CLASSIFIER, TOKENS) else None
    problem = heads.problem_of(config.get("problem_type"), len(names or ()))
    number_of = {symbol: n for symbol, n in zip(symbols_of(source.files, source.rows), numbers, strict=False) if n >= 0}
    place = tokenizer_place(source.files)
    text = own if trust else TokenizerText(place) if place and (folder / SETTINGS).is_file() else None
    longest = text.tokenizer.longest(longest) if isinstance(text, TokenizerText) else longest
    pipeline = head.pipeline if head is not MASKED_LM or MASK in number_of else ""
    encode = text and (lambda line: [number_of.get(symbol, number_of.get(UNKNOWN)) for symbol in text.encode(line)])
    pair: tuple[list[int], ...] = ()
    if encode:
        form = Pairs(pairs_of(source, text), source.plan.segment_encoding != "none")
        pair = form.joined([encode(part) for part in PAIR], number_of[SPECIAL[BOS]], number_of[SPECIAL[EOS]])
    asked = {
        **{"auto": head.auto, "kind": head.kind, "pipeline": pipeline, "trust": trust},
        **{"text": text is not None, "lines": tried_ids(own, number_of, [BOS], [EOS]) if own else {}},
        **{"problem": problem, "said": bool(config.get("problem_type")), "classes": len(names or ())},
        **{"names": names, "longest": longest, "mask": number_of.get(MASK), "pair": [*pair]},
    }

    def loss(ours: Outputs, labels: dict[str, Tensor]) -> Tensor | None:
        if not labels:
            return None
        if head is MASKED_LM:
            known = torch.tensor([row for _, row in sorted((n, row) for row, n in enumerate(numbers) if n >= 0)])
            return cross_entropy(ours["logits"][..., known].flatten(0, 1), labels["labels"].flatten())
        found = ours[head.kind]
        if head in (TOKENS, CHOICES):
            return heads.class_loss(found, labels["labels"])
        if head is SPANS:
            parts = zip(found.unbind(-1), (labels["start_positions"], labels["end_positions"]), strict=True)
            return sum(cross_entropy(logits, places) for logits, places in parts) / 2
        return heads.loss_of(problem, found, labels["labels"])

    try:
        return check_folder(
            folder,
            asked,
            {number: row for row, number in enumerate(numbers) if number >= 0},
            _with_head(source, head, chosen),
            encode,
            loss,
        )
    except NotOpenedError as error:
        raise ConversionError(f"the folder is not written: {error}") from None


def _with_head(source: SavedModel, head: Head, chosen: str | None) -> Callable[[Tensor, Tensor | None], Outputs]:
    """Return what runs a relpos_roberta with a head on rows and segments, the latter as far as it reads them.

    For multiple choice the rows are the choices of one question.
    """
    kind = CLASSIFIER.kind if head is CHOICES else head.kind
    reads = source.plan.segment_encoding != "none"

    def run(rows: Tensor, segments: Tensor | None) -> Outputs:
        zeros = torch.zeros_like(rows)
        found = source.outputs(rows, (zeros if segments is None else segments) if reads else None)
        own = f"{kind} {chosen}"
        found |= {kind: found[own]} if own in found else {}
        return found | {head.kind: found[kind].view(1, -1)} if head is CHOICES else found

    return run
