"""Export a checkpoint as ONNX graphs, compared with the checkpoint at sizes that were not traced."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.modules import AdaptiveInput
from torch import Tensor, nn

from relpos_fairseq.export.model_adapters import Graph, ModelAdapter, adapter_of
from relpos_fairseq.formats.closing_check import TOLERANCE, agree, measured
from relpos_fairseq.inference.model_card import write_export_card
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, sha256_of, write_json
from relpos_fairseq.io.packages import require
from relpos_fairseq.io.progress import doing, progress
from relpos_fairseq.saved.model import SavedModel

QUANTIZED = 0.2  # the same in int8, beside the largest logit
ONE_FILE = 1_500_000_000  # bytes of weights, beyond which they lie beside the graph: protobuf's end
REPORT = "relpos.json"
Run = Callable[..., list[np.ndarray]]


def export(checkpoint: Path, out: Path, data: Path | None, quantization: str | None = None) -> float:
    """Export a checkpoint to a folder of graphs, which appears only if they compute what the checkpoint does.

    Args:
        checkpoint: of any relpos model.
        out: new folder.
        data: folder of its dictionaries; None: dictionaries of the right size stand in.
        quantization: `int8` for weights in int8, by onnxruntime's own tool; None: fp32.

    Returns:
        The largest difference of a logit.

    Raises:
        UserError: a model that has no graphs, or one whose graphs differ.
    """
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package)
    model, _ = SavedModel.open(checkpoint).build_anyway(data)
    embed_plainly(model)
    kind = adapter_of(model.float().eval())
    with atomic_folder(out) as folder:
        runs, facts = {}, {}
        for graph in progress(kind.graphs(), description="export", unit="graphs"):
            path = folder / f"{graph.name}.onnx"
            with doing(f"write {path.name}"):
                write(graph, path)
            runs[graph.name] = runner(path)
            facts[path.name] = {
                "inputs": {name: described(graph, name) for name in graph.inputs},
                "outputs": list(graph.outputs),
                **graph.about,
            }
        largest, size, text = compare(kind, runs)
        print(f"onnxruntime and the checkpoint: {text}: largest difference {largest:.1e}")
        if not agree(largest, size):
            raise UserError(
                f"{checkpoint}: the graphs' logits differ by {largest:.1e} (allowed: {TOLERANCE:.0e}, beside values up "
                f"to {size:.3g}), so nothing was written"
            )
        if quantization:
            for path in progress(sorted(folder.glob("*.onnx")), description="quantize", unit="graphs"):
                quantize(path)
            runs = {path.stem: runner(path) for path in folder.glob("*.onnx")}
            largest, size, text = compare(kind, runs)
            print(f"in {quantization}: {text}: largest difference {largest:.1e} (values up to {size:.3g})")
            if not largest <= QUANTIZED * size:
                raise UserError(f"{checkpoint}: in {quantization} logits differ by {largest:.1e}: export it in fp32")
        about = {"name": checkpoint.name, "sha256": sha256_of(checkpoint)}
        compared = {"text": text, "largest_difference": largest, "weights": quantization or "fp32"}
        told = {"checkpoint": about, "graphs": facts, "comparison": compared, **kind.facts()}
        write_json(folder / REPORT, told)
        write_export_card(checkpoint, folder, "ONNX", card_of(told))
    return largest


def card_of(facts: dict[str, Any]) -> dict[str, object]:
    """Return rows of the model card from relpos.json."""
    rows: dict[str, object] = {"graphs": ", ".join(facts["graphs"])}
    for package in ("onnx", "onnxruntime"):
        rows[package] = require(package).__version__
    known = ("encoder_positions", "positions", "longest")
    rows |= {name: facts[name] for name in known if facts.get(name) is not None}
    rows |= {f"comparison: {name}": value for name, value in facts["comparison"].items()}
    return rows | {"checkpoint's sha256": facts["checkpoint"]["sha256"]}


def described(graph: Graph, name: str) -> list[int | str]:
    """Return the sizes of an input, with names for those that are free."""
    sizes = graph.free.get(name, {})
    axes = enumerate(graph.inputs[name].shape)
    return [str(getattr(sizes[axis], "__name__", sizes[axis])) if axis in sizes else size for axis, size in axes]


@contextmanager
def silence() -> Iterator[None]:
    """Silence the exporter's log lines and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@torch.no_grad()
def embed_plainly(model: Any) -> None:
    """Replace adaptive embeddings, whose choice of a table is no graph, by one table of what they give, in place."""
    for part in model.modules():
        adaptive = getattr(part, "embed_tokens", None)
        if isinstance(adaptive, AdaptiveInput):
            rows = adaptive(torch.arange(adaptive.cutoff[-1]))
            part.embed_tokens = nn.Embedding.from_pretrained(rows, padding_idx=adaptive.padding_idx)


def write(graph: Graph, path: Path) -> None:
    """Write a graph to a file; weights too large for one file get a second file beside it."""
    with silence():
        program = torch.onnx.export(
            graph.exported(),
            dynamo=True,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            verbose=False,
        )
        weights = sum(part.nbytes for part in graph.module.state_dict().values())
        program.save(str(path), external_data=weights > ONE_FILE)


def quantize(path: Path) -> None:
    """Replace a graph's products with weights by those of integers, in place: inputs are quantized as they come."""
    require("onnxruntime")
    from onnxruntime.quantization import QuantType, quantize_dynamic

    parts = sorted(path.parent.glob(f"{path.name}.*"))  # weights beside the graph
    made = path.with_suffix(".int8.onnx")
    graph = require("onnx").load(str(path), load_external_data=False).graph
    sizes = {weight.name: len(weight.dims) for weight in graph.initializer}
    stacked = [node.name for node in graph.node if any(sizes.get(name, 2) > 2 for name in node.input)]
    with silence():
        # Weights have 7 bits: on a processor without VNNI pairs of products are added in 16 bits, and 8 would overflow.
        quantize_dynamic(
            path,
            made,
            per_channel=True,  # one weight that is far larger than all others spoils its own column alone
            nodes_to_exclude=stacked,  # whose columns onnxruntime does not scale
            weight_type=QuantType.QInt8,
            reduce_range=True,
            use_external_data_format=bool(parts),
        )
    for part in parts:
        part.unlink()
    made.replace(path)


def runner(path: Path) -> Run:
    """Return a function that runs a written graph on tensors by name."""
    ort = require("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = [part.name for part in session.get_inputs()]  # what no output needs is left out

    def run(**inputs: Tensor | np.ndarray) -> list[np.ndarray]:
        return session.run(None, {name: np.asarray(inputs[name]) for name in wanted})

    return run


@torch.inference_mode()
def compare(kind: ModelAdapter, runs: dict[str, Run]) -> tuple[float, float, str]:
    """Return the largest difference at sizes that were not traced, the largest logit, and the sizes in words."""
    largest, size, sizes = 0.0, 0.0, []
    for rows, length in progress(kind.sizes(), description="compare", unit="sizes"):
        sizes.append(f"{rows} x {length}")
        for ours, theirs in kind.compared(runs, rows, length):
            found, own = measured(torch.from_numpy(theirs), ours)
            largest, size = max(largest, found if found == found else float("inf")), max(size, own)
    return largest, size, f"rows x tokens {', '.join(sizes)}"
