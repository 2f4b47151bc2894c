"""A translation or language model's checkpoint as a folder that generates in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from relpos_fairseq.conversion.checkpoints import read_checkpoint
from relpos_fairseq.conversion.translation.generating import plain_task, shared_names
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_folder, sha256_of
from relpos_fairseq.export.extras import ExportError
from relpos_fairseq.export.graphs import scores_of
from relpos_fairseq.export.transformers import PAD
from relpos_fairseq.export.transformers_folder import TOLERANCE, Exported
from relpos_fairseq.export.transformers_generation import EOS, RelPosForCausalLM, RelPosForSeq2SeqLM
from relpos_fairseq.export.transformers_memory import RelPosWithMemoryForCausalLM
from relpos_fairseq.export.transformers_text import symbols_of, write_tokenizer
from relpos_fairseq.inference.beside import copy_text, text_folder
from relpos_fairseq.inference.card import write_export_card
from relpos_fairseq.inference.checkpoints.trusted import read_trusted
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel
from relpos_fairseq.models.relpos_transformer_lm import RelPosTransformerLanguageModel
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.pictures.model import load

CLASSES = {
    RelPosTransformerModel: RelPosForSeq2SeqLM,
    RelPosTransformerLanguageModel: RelPosForCausalLM,
    RelPosTransformerXLModel: RelPosWithMemoryForCausalLM,
}


def generates(checkpoint: Path) -> bool:
    """Whether a checkpoint is a decoder's, of this file, and not RoBERTa's."""
    if not checkpoint.is_file():
        return False
    return any(n.startswith("decoder.positions.") for n in read_checkpoint(checkpoint)["model"])


def export(checkpoint: Path, out: Path, data: Path | None) -> Exported:
    """Write a folder that AutoModelForSeq2SeqLM or AutoModelForCausalLM loads.

    Args:
        checkpoint: of a `relpos_transformer` or `relpos_transformer_lm`.
        out: new folder.
        data: where its dictionaries and units are; None: what lies beside it.

    Raises:
        ExportError: the folder exists, another kind of model, or outputs that differ.
    """
    if out.exists():
        raise ExportError(f"{out} exists: remove it, or name another folder")
    state = read_trusted(checkpoint)
    options = state["cfg"]
    model, _ = load(checkpoint, None)
    kind = next((kind for own, kind in CLASSES.items() if isinstance(model, own)), None)
    if kind is None:
        raise ExportError(f"{checkpoint} holds a {type(model).__name__}: give a translation or language model")
    if getattr(getattr(model, "encoder", None), "skips_end", False):
        raise ExportError(
            f"{checkpoint}: its encoder skips </s>, and transformers' decoder would not: use "
            f"relpos translate, relpos export ct2 or relpos export onnx"
        )
    languages = [options.task.get(f"{side}_lang") for side in ("source", "target")]
    parts = [getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)]
    rows = [len(part.dictionary) for part in parts]
    sides = list(zip(languages if len(rows) > 1 else [None], rows, strict=True))
    text, said = None, ""
    try:
        text = text_folder(checkpoint, data, str(options.task.get("data") or ""), state)
        for language, count in sides:
            symbols_of(text, count, language)
    except PreparationError as error:
        if data is not None:
            raise
        said = f"none: {error}"
    with atomic_folder(out) as folder:
        config = config_of(kind, options, model, rows)
        shared = shared_names(model)
        tensors = {f"model.{n}": v.contiguous() for n, v in model.state_dict().items() if n not in shared}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        search_of(model).save_pretrained(folder)
        differences = {"logits": difference(model, kind, folder)}
        if text is not None:
            copy_text(text, folder)
            form = "translation" if len(rows) > 1 else "language model"
            said = write_tokenizer(folder, form, sides, longest=model.decoder.positions.plan.longest)
        facts = {"transformers": transformers.__version__}
        for part in parts:
            name = part.positions.plan.shape.seed_name
            facts[f"{name}: position scheme"] = part.positions.plan.describe()
        facts["parameters"] = sum(one.numel() for one in model.parameters())
        facts |= {f"largest difference: {n}": f"{v:.1e}" for n, v in differences.items()}
        facts |= {"tokenizer": said, "checkpoint's sha256": sha256_of(checkpoint)}
        write_export_card(checkpoint, folder, "transformers", facts)
    return Exported(differences, said)


def config_of(kind: type, options: Any, model: nn.Module, rows: list[int]) -> Any:
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


def search_of(model: nn.Module) -> GenerationConfig:
    longest = model.decoder.positions.plan.longest
    return GenerationConfig(
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        decoder_start_token_id=EOS,
        suppress_tokens=[PAD],
        max_length=min(200, longest or 200),
    )


@torch.inference_mode()
def difference(model: nn.Module, kind: type, folder: Path) -> float:
    """Return the largest difference of a logit after tokens that are padded or kept in a cache.

    Raises:
        ExportError: it is too large.
    """
    loaded, ours = kind.from_pretrained(folder).eval(), model.float().eval()
    draw = torch.Generator().manual_seed(1)
    length = min(11, ours.decoder.positions.plan.longest or 11)
    segment = length
    if kind is RelPosWithMemoryForCausalLM:
        segment = int(loaded.config.values["tokens_per_sample"])
        length = segment + 5
    tokens = torch.randint(4, len(ours.decoder.dictionary), (3, length), generator=draw)
    tokens[:, 0] = EOS
    source, given = None, {"input_ids": tokens}
    if kind is RelPosForSeq2SeqLM:
        words = torch.randint(4, len(ours.encoder.dictionary), (3, length), generator=draw)
        words[:, -1], words[1, :2] = EOS, PAD
        source = ours.encoder(words)
        given = {"input_ids": words, "attention_mask": (words != PAD).long(), "decoder_input_ids": tokens}
    expected, after = [], {}
    for part in tokens.split(segment, dim=1):
        output, extra = ours.decoder(part, source, **after)
        expected.append(scores_of(ours.decoder, output))
        after = {"memory": extra["memory"]} if "memory" in extra else {}
    expected = torch.cat(expected, dim=1)
    whole: Tensor = loaded(**given).logits
    last: Tensor = loaded(**given, use_cache=True).logits[:, -1]
    largest = max(float((whole - expected).abs().max()), float((last - expected[:, -1]).abs().max()))
    if not largest < TOLERANCE:
        raise ExportError(f"{folder.name}: transformers' logits differ by {largest:.1e}")
    return largest
