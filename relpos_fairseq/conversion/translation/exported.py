"""A folder of `relpos export transformers` that generates, or what transformers saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relpos_fairseq.conversion.huggingface.files import read_json, read_weights
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.translation.generating import Generating, build, shared_names

# model_type to the kind of model.
KINDS = {
    "relpos_translation": "translation",
    "relpos_language_model": "language_modeling",
    "relpos_memory_language_model": "segment_language_modeling",
}
PREFIX = "model."
TEXT = "text"


def read(folder: Path, config: dict[str, Any]) -> Generating:
    """Read a folder.

    Raises:
        ConversionError: tensors of another model.
    """
    kind, values = KINDS[config["model_type"]], config["values"]
    rows = (config.get("source_rows") or config["vocab_size"], config["vocab_size"])
    weights = read_weights(folder)
    model = build(kind, values, rows)
    own, shared = model.state_dict(), shared_names(model)
    unknown = sorted(n for n in weights if n.removeprefix(PREFIX) not in own or PREFIX not in n)
    state = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    for name, source in shared.items():
        known = state.get(name, state.get(source))
        if known is not None:
            state[name] = state[source] = known
    missing = sorted(name for name in own if name not in state and not name.endswith("version"))
    if unknown or missing:
        raise ConversionError(
            f"{folder}: {unknown[0] if unknown else PREFIX + missing[0]} is "
            f"{'no tensor' if unknown else 'missing'} of a {config['model_type']}: copy the whole "
            f"folder again"
        )
    state |= {name: value for name, value in own.items() if name.endswith("version")}
    text = folder / TEXT
    found = (path for path in sorted(text.rglob("*")) if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in found}
    return Generating(kind, values, rows, state, _task(folder, config, kind), files)


def _task(folder: Path, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Options of the task; folders that older versions exported know the languages alone."""
    task = dict(config.get("task") or {})
    path = folder / "relpos_text.json"
    if kind == "translation" and not task.get("source_lang") and path.is_file():
        source, target = read_json(path)["languages"]
        task |= {"source_lang": source, "target_lang": target}
    limits = ("max_source_positions", "max_target_positions", "tokens_per_sample")
    known = {name: config["values"][name] for name in limits if isinstance(config["values"].get(name), int)}
    return {"_name": kind} | known | task
