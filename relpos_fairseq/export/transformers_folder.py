"""Export a checkpoint as a folder that transformers' Auto classes load."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from relpos_fairseq.conversion.report import Probe, compare
from relpos_fairseq.export.model_adapters import scores_of
from relpos_fairseq.export.transformers import (
    AUTO,
    RelPosConfig,
    RelPosForCausalLM,
    RelPosForSeq2SeqLM,
    RelPosWithMemoryForCausalLM,
)
from relpos_fairseq.export.transformers_text import symbols_of, write_tokenizer
from relpos_fairseq.formats.base import read_encoder
from relpos_fairseq.formats.closing_check import NotOpenedError, agree, check_generating
from relpos_fairseq.formats.exported import ROBERTA_PREFIX, TIED
from relpos_fairseq.formats.huggingface_export import check_written, classes_said, pairs_of
from relpos_fairseq.heads import (
    CAUSAL_LM,
    CHOICES,
    CLASSIFIER,
    HEAD,
    MASKED_LM,
    MODEL,
    RANKING,
    SPAN_HEAD,
    SPANS,
    TOKENS,
    TRANSLATION,
    Head,
    OwnHead,
)
from relpos_fairseq.inference.model_card import write_export_card
from relpos_fairseq.inference.translator import Search
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, sha256_of
from relpos_fairseq.io.progress import doing
from relpos_fairseq.io.tensor_files import check_finite
from relpos_fairseq.models.building import shared_names
from relpos_fairseq.saved.checkpoint import plain_task
from relpos_fairseq.saved.model import LANGUAGES, SavedModel
from relpos_fairseq.text.assets import TEXT_FOLDER, asset_files_of, copy_assets, label_names, read_text
from relpos_fairseq.text.dictionary import BOS, EOS, PAD, SPECIAL
from relpos_fairseq.text.transformers_files import tried_ids

SHORT = 11  # tokens of a random input

AROUND = {"translation": ([], [EOS]), "denoising": ([BOS], [EOS]), "language model": ([EOS], [])}  # a text's words
CLASSES = {kind.our_name: kind for kind in (RelPosForSeq2SeqLM, RelPosForCausalLM, RelPosWithMemoryForCausalLM)}


def summary(differences: dict[str, float], tokenizer: str, closing: str) -> str:
    """Return in a line the largest difference of each output, what the tokenizer is, and what was compared last."""
    parts = (f"{name} {value:.1e}" for name, value in differences.items())
    return f"largest differences: {', '.join(parts)}; tokenizer: {tokenizer}; {closing}"


def export_roberta(checkpoint: Path, out: Path, data: Path | None, head: str | None) -> str:
    """Export a RoBERTa checkpoint to a folder that transformers' Auto classes load; return its `summary`.

    Args:
        checkpoint: a RoBERTa's.
        out: new folder.
        data: folder of its dictionary and tokenizer; None: the files beside it.
        head: name of the head to export; None: the only one of its kind.

    Raises:
        UserError: the folder exists, there are several heads, or outputs in transformers differ.
    """
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder")
    source = read_encoder(checkpoint)
    heads = heads_of(source, head)
    text, why = text_of(source, data)
    if source.task.get("_name") in ("sentence_prediction", RANKING) and source.task.get("init_token") is None:
        text, why = None, "none: the model was trained without --init-token 0"
    if text is not None:
        symbols_of(text, source.rows)
        read_text(text)
    check_finite(source.state, checkpoint)
    with atomic_folder(out) as folder:
        config = roberta_config(source, heads, text)
        save_file(tensors_of(source, heads, config), folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        with doing("compare outputs"):
            differences = differences_of(source, heads, folder)
        if text is not None:
            copy_assets(text, folder)
            segments = source.plan.segment_encoding != "none"
            sides = [(None, source.rows)]
            why = write_tokenizer(folder, "roberta", sides, config.pair_separators, segments, source.plan.longest)
        source.files = asset_files_of(text) if text else {}
        own = read_text(folder / TEXT_FOLDER) if text else None
        head, chosen = (heads[-1].head, heads[-1].name) if heads else (MASKED_LM, None)  # what config.json names
        numbers = list(range(source.rows))
        told = config.to_diff_dict() | {"id2label": config.id2label}
        closing = check_written(folder, source, head, told, numbers, source.plan.longest, chosen, True, own)
        left = [*source.origin.kept, *source.kept_files]
        write_export_card(checkpoint, folder, "transformers", card_of(differences, why, checkpoint, source))
    return summary(differences, why, closing + f"; left out: {', '.join(left)}" * bool(left))


def text_of(saved: SavedModel, data: Path | None) -> tuple[Path | None, str]:
    """Return the folder of a model's text, or why there is none; one that is named must have it."""
    try:
        return saved.find_text(data), ""
    except UserError as error:
        if data is not None:
            raise
        return None, f"none: {error}"


def heads_of(source: SavedModel, wanted: str | None) -> list[OwnHead]:
    """Return the heads that are exported: the named one, or that of each kind, of classifiers the one that was trained.

    Raises:
        UserError: the head does not exist, or there are several to choose from.
    """
    found, trained = source.heads, any(one.trained for one in source.heads)
    if wanted is not None and wanted not in [one.called for one in found]:
        raise UserError(f"--head {wanted}: {source.path} has {', '.join(one.called for one in found) or 'no head'}")
    if wanted:
        found = [one for one in found if one.called == wanted]
    elif trained:
        found = [one for one in found if one.trained or one.head.place != CLASSIFIER.place]
    for of_spans in (True, False):  # one config.json names the classes of one
        names = [one.called for one in found if (one.head is SPANS) == of_spans]
        if len(names) > 1:
            raise UserError(f"{source.path} has the heads {', '.join(names)}: name one by --head")
    return found


def roberta_config(source: SavedModel, heads: list[OwnHead], text: Path | None) -> RelPosConfig:
    """Return the config of the folder, with the options of the task and of the heads."""
    task = plain_task(source.task)
    more: dict[str, Any] = {"architectures": ["RelPosForMaskedLM"]}
    for one in heads:
        kind = one.head
        more["architectures"] = [f"RelPos{kind.suffix}"]
        if kind is SPANS:
            task["span_head_name"] = SPAN_HEAD
        if kind in (CLASSIFIER, CHOICES):
            task["classification_head_name"] = HEAD
        if kind in (CLASSIFIER, TOKENS):
            more |= classes_said(source, kind, one.outputs, label_names(text, one.outputs))
    return RelPosConfig(
        source.values,
        source.rows,
        task,
        pair_separators=pairs_of(source, read_text(text) if text else None),
        tie_word_embeddings=not source.values.get("untie_weights_roberta"),
        **more,
    )


def tensors_of(source: SavedModel, heads: list[OwnHead], config: RelPosConfig) -> dict[str, torch.Tensor]:
    """Return the folder's tensors: the model's and those of the exported heads, without tied ones."""
    kept, named = {}, {one.prefix: one.head.prefix for one in heads}
    left = tuple(one.prefix for one in source.heads if one not in heads)
    for name, value in source.state.items():
        if name.startswith(left):
            continue
        old = next((start for start in named if name.startswith(start)), "")
        value = value.float() if value.is_floating_point() else value  # what every release loads as it is
        kept[ROBERTA_PREFIX + named.get(old, "") + name.removeprefix(old)] = value.clone().contiguous()
    if config.tie_word_embeddings:
        kept.pop(ROBERTA_PREFIX + TIED, None)
    return kept


@torch.inference_mode()
def differences_of(source: SavedModel, heads: list[OwnHead], folder: Path) -> dict[str, float]:
    """Return the largest difference of every output between transformers and the checkpoint, without padding.

    Raises:
        UserError: one is too large.
    """
    segments = source.plan.segment_encoding != "none"
    probe = Probe.draw(source.rows, int(source.values["max_positions"]), segments)
    given = {"input_ids": probe.tokens, "attention_mask": probe.real.long()}
    given |= {"token_type_ids": probe.segments} if segments else {}
    ours, theirs = source.outputs(probe.tokens, probe.segments), {}
    named = {one.head: one.name for one in heads}
    for head in (MODEL, MASKED_LM, *named):
        batch = {name: part[None] for name, part in given.items()} if head is CHOICES else given  # of one question
        found = AUTO[head.auto].from_pretrained(folder).eval()(**batch)
        spans = head is SPANS
        theirs[head.kind or "features"] = torch.stack([found.start_logits, found.end_logits], -1) if spans else found[0]
    for head, name in named.items():  # of several heads each has its name
        kind = CLASSIFIER.kind if head is CHOICES else head.kind
        output = ours.get(kind, ours.get(f"{kind} {name}"))
        ours[head.kind] = output.view(1, -1) if head is CHOICES else output
    ours = {name: value for name, value in ours.items() if name in theirs}
    found = compare(ours, theirs, probe)
    for name, value in found.largest.items():
        if not agree(value, found.magnitude[name]):
            raise UserError(f"{source.path}: transformers' {name} differ by {value:.1e}")
    return found.largest


def card_of(differences: dict[str, float], tokenizer: str, checkpoint: Path, source: SavedModel) -> dict[str, object]:
    """Return rows of the model card of a RoBERTa."""
    counted = (value for name, value in source.state.items() if value.is_floating_point() and name != TIED)
    rows: dict[str, object] = {"transformers": transformers.__version__, "position scheme": source.plan.describe()}
    rows["parameters"] = sum(value.numel() for value in counted)
    rows |= {f"largest difference: {name}": f"{v:.1e}" for name, v in differences.items()}
    if any(one.head is SPANS for one in source.heads):
        rows["loss"] = "of all tokens, as transformers computes it; fairseq's training leaves question and padding out"
    text = "none" if tokenizer.startswith("none") else f"{TEXT_FOLDER}/"
    return rows | {"tokenizer": tokenizer, "text": text, "checkpoint's sha256": sha256_of(checkpoint)}


def generates(checkpoint: Path) -> bool:
    """Tell whether a checkpoint holds a translation or language model, not a RoBERTa."""
    return checkpoint.is_file() and SavedModel.read(checkpoint, mapped=True).generates


def export_generating(checkpoint: Path, out: Path, data: Path | None) -> str:
    """Export a translation or language model for AutoModelForSeq2SeqLM or AutoModelForCausalLM; return its `summary`.

    Args:
        checkpoint: a translation or language model's.
        out: new folder.
        data: folder of its dictionaries and text files; None: the files beside it.

    Raises:
        UserError: the folder exists, another kind of model, or outputs that differ.
    """
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder")
    opened = SavedModel.open(checkpoint)
    options, saved = copy.deepcopy(opened.checkpoint["cfg"]), opened.options
    model, _ = opened.build_anyway(data)
    kind = CLASSES[opened.name]
    if getattr(getattr(model, "encoder", None), "skips_end", False):
        raise UserError(
            f"{checkpoint}: its encoder skips </s>, and transformers' decoder would not: use "
            f"relpos translate, relpos export ct2 or relpos export onnx"
        )
    parts = [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]
    rows = [len(part.dictionary) for part in parts]
    sides = list(zip(saved.languages if len(rows) > 1 else [None], rows, strict=True))
    text, said = text_of(opened, data)
    more = opened.framing
    if more == LANGUAGES:
        text, said = None, f"none: texts of {saved.task_name} have {more}, which the task alone writes"
    for language, count in sides if text else ():
        symbols_of(text, count, language)
        read_text(text, language)
    check_finite(model.state_dict(), checkpoint)
    with atomic_folder(out) as folder:
        config = generating_config(kind, options, model, rows)
        shared = shared_names(model)
        tensors = {f"model.{n}": v.contiguous() for n, v in model.state_dict().items() if n not in shared}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        search_of(model).save_pretrained(folder)
        if text is not None:
            copy_assets(text, folder)
            form = "denoising" if more else "translation" if len(rows) > 1 else "language model"
            said = write_tokenizer(folder, form, sides, longest=model.decoder.positions.plan.longest)
        head = TRANSLATION if kind is RelPosForSeq2SeqLM else CAUSAL_LM
        segment = int(config.values["tokens_per_sample"]) if kind is RelPosWithMemoryForCausalLM else None
        with doing("compare outputs"):
            differences, closing = check_generated(folder, out, model, head, segment, sides, form if text else None)
        facts = {"transformers": transformers.__version__}
        for part in parts:
            name = part.positions.plan.shape.seed_name
            facts[f"{name}: position scheme"] = part.positions.plan.describe()
        facts["parameters"] = sum(one.numel() for one in model.parameters())
        facts |= {f"largest difference: {n}": f"{v:.1e}" for n, v in differences.items()}
        facts |= {"tokenizer": said, "checkpoint's sha256": sha256_of(checkpoint)}
        if head is CAUSAL_LM:
            facts["generate"] = "ends at </s>, a line's end; with eos_token_id=None it goes on"
        write_export_card(checkpoint, folder, "transformers", facts)
    return summary(differences, said, closing)


def generating_config(kind: Any, options: Any, model: Any, rows: list[int]) -> Any:
    """Return the config of the folder: the checkpoint's values, sizes of vocabularies, and the task's options."""
    values = OmegaConf.to_container(options.model, resolve=True, enum_to_str=True)
    values = {n: v for n, v in values.items() if n != "_name" and not n.endswith("embed_path")}
    more = {"source_rows": rows[0]} if len(rows) > 1 else {}
    return kind.config_class(
        json.loads(json.dumps(values)),
        rows[-1],
        plain_task(options.task),
        architectures=[kind.__name__],
        tie_word_embeddings=bool(shared_names(model)),
        **more,
    )


def search_of(model: Any) -> GenerationConfig:
    """Return the GenerationConfig that makes generate() search as fairseq does, for translations by its own defaults.

    fairseq ends a sentence's search when it has as many hypotheses as beams, and none of them is empty.  A decoder
    reads all symbols but the last of the longest sequence: </s>, --max-len-b symbols, </s>.
    """
    longest = model.decoder.positions.plan.longest
    search, defaults = {}, Search()
    if hasattr(model, "encoder"):
        beams = min(defaults.beam, len(model.decoder.dictionary) - 1)  # fairseq has no more
        search = {"num_beams": beams, "early_stopping": True, "length_penalty": defaults.lenpen}
        search |= {"min_length": 1 + defaults.min_len}
    return GenerationConfig(
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        decoder_start_token_id=EOS,
        suppress_tokens=[PAD],
        max_length=min(defaults.max_len_b + 1, longest or defaults.max_len_b + 1) + 1,
        **search,
    )


@torch.inference_mode()
def check_generated(
    folder: Path,
    out: Path,
    model: Any,
    head: Head,
    segment: int | None,
    sides: list[tuple[str | None, int]],
    form: str | None,
) -> tuple[dict[str, float], str]:
    """Open a written folder in a process of its own; return the largest differences of logits, and what was compared.

    Args:
        folder: the folder.
        out: its name when it is whole.
        model: the checkpoint's model.
        head: of the folder's class.
        segment: tokens between which the model moves its memory; None: it has none.
        sides: language and rows of its input and output.
        form: of its tokenizer's texts, or None.

    Raises:
        UserError: it does not load, or something differs.
    """
    ours, draw = model.float().eval(), torch.Generator().manual_seed(1)
    decoder, longest = ours.decoder, ours.decoder.positions.plan.longest
    length = min(SHORT, longest or SHORT) if segment is None else segment + SHORT // 2
    tokens = torch.randint(4, sides[-1][1], (3, length), generator=draw)
    tokens[:, 0] = EOS
    batch, source, prompt = {"input_ids": tokens}, None, max(1, length - SHORT // 2 - 3)
    if head is TRANSLATION:
        most = min(SHORT, ours.encoder.positions.plan.longest or SHORT)
        words = torch.randint(4, sides[0][1], (3, most), generator=draw)
        words[:, -1], words[1, : words.size(1) // 2] = EOS, PAD
        batch, source, prompt = {"input_ids": words, "attention_mask": (words != PAD).long()}, ours.encoder(words), 1
        batch["decoder_input_ids"] = tokens

    def scores(prefix: Tensor) -> Tensor:
        outputs, after = [], {}
        for part in prefix.split(segment or prefix.size(1), dim=1):
            output, extra = decoder(part, source, **after)
            outputs.append(scores_of(decoder, output))
            after = {"memory": extra["memory"]} if segment else {}
        return torch.cat(outputs, dim=1)

    loss = None
    if decoder.adaptive_softmax is None and (source or length > 1):
        before, labels = (scores(tokens), tokens) if source else (scores(tokens)[:, :-1], tokens[:, 1:])
        loss = float(nn.functional.cross_entropy(before.flatten(0, 1), labels.flatten()))
    asked = {
        **{"auto": head.auto, "kind": head.kind, "pipeline": head.pipeline, "trust": True, "text": bool(form)},
        **{"batch": {name: rows.tolist() for name, rows in batch.items()}, "prompt": prompt, "longest": longest},
        **{"trains": loss is not None, "lines": {}, "targets": {}},
    }
    if form:
        place, around = folder / TEXT_FOLDER, AROUND[form]
        texts = [(read_text(place, language), symbols_of(place, rows, language)) for language, rows in sides]
        tried = [tried_ids(own, {symbol: n for n, symbol in enumerate(symbols)}, *around) for own, symbols in texts]
        (own, symbols), asked["lines"] = texts[-1], tried[0]
        asked["targets"] = {
            line: (ids, own.decode([symbols[n] for n in ids if n >= len(SPECIAL)])) for line, ids in tried[-1].items()
        }
    try:
        return check_generating(folder, asked, scores, loss)
    except NotOpenedError as error:
        raise UserError(f"{out} is not written: {error}") from None
