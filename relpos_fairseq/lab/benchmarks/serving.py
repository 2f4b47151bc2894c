"""Measure speed, memory and BLEU of a checkpoint: fairseq-generate, `relpos translate`, CTranslate2, by type of weight.

fairseq's own transformer and transformers' Marian, untrained and of the same shape, write as many tokens of each batch
as the checkpoint's longest translation there.  Each timing has a process of its own: in one process, threads of one
translator that wait for work would take the processor from another's.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from sacrebleu.metrics import BLEU

from relpos_fairseq.export import ct2
from relpos_fairseq.export.ct2 import load_translation
from relpos_fairseq.inference.checkpoints import loading
from relpos_fairseq.inference.commands import open_translator
from relpos_fairseq.inference.translator import Batching, Search, batches
from relpos_fairseq.io.child import command_of
from relpos_fairseq.io.errors import ToolError, UserError
from relpos_fairseq.io.packages import require
from relpos_fairseq.io.processes import mebibytes
from relpos_fairseq.io.progress import table
from relpos_fairseq.nn.packed import BFloat16Linear

PACKAGE = Path(__file__).resolve().parents[2]
TIMED = re.compile(r"Translated .*?\(([\d.]+) sentences/s")
COMPARED, COMPARED_IN_TURNS = 64, 8  # sentences on which an export is compared with the checkpoint
Lines = list[list[str]]  # symbols of each sentence


@dataclass(frozen=True)
class Served:
    """A test set, translated once.

    Args:
        seconds: without the start.
        start: seconds until the first batch.
        memory: peak of the process, in MiB.
        lines: the best translation of each sentence; empty ones of an untrained model.
        tokens: that were written, `</s>` among them.
    """

    seconds: float
    start: float
    memory: float
    lines: Lines
    tokens: int


def _written(lines: Lines) -> int:
    return sum(len(line) + 1 for line in lines)


def benchmark(checkpoint: Path, data: Path, split: str, beam: int, rounds: int) -> str:
    """Return a table of speed, memory and BLEU; translators take turns, and a row is the median of its rounds.

    All translate the same batches, those of `relpos translate`. BLEU is sacrebleu's, of detokenized text.
    """
    with tempfile.TemporaryDirectory() as name:
        folders = {kind: Path(name) / kind for kind in ("fp32", "int8")}
        sources, references = run_apart(_read, checkpoint, data, split)
        refused = ""
        try:
            for kind, folder in folders.items():
                run_apart(ct2.export, checkpoint, folder, None if kind == "fp32" else kind, data, COMPARED)
        except UserError as error:  # a scheme that the engine has not
            folders, refused = {}, f"\nCTranslate2: {error}"
        runs: dict[str, Callable[[], Served]] = {
            "fairseq-generate": partial(_fairseq, checkpoint, data, split, beam),
            "relpos translate": partial(run_apart, _translated, checkpoint, data, sources, beam),
            "relpos translate int8": partial(run_apart, _translated, checkpoint, data, sources, beam, "int8"),
        }
        if run_apart(BFloat16Linear.problem) is None:
            runs["relpos translate bf16"] = partial(run_apart, _translated, checkpoint, data, sources, beam, "bf16")
        for kind, folder in folders.items():
            runs[f"CTranslate2 {kind}"] = partial(run_apart, _translated, folder, None, sources, beam)
        served: dict[str, list[Served]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                served[name].append(run())
        lengths = [len(line) for line in served["relpos translate"][-1].lines]
        for name, function in (("fairseq's transformer", _of_fairseq), ("transformers' Marian", _of_marian)):
            peer = partial(run_apart, _of_same_shape, function, checkpoint, data, sources, lengths, beam)
            served[name] = [peer() for _ in range(rounds)]
    whole = {name: each[-1].lines for name, each in served.items() if any(each[-1].lines)}
    bleu = run_apart(_bleu, checkpoint, data, references, whole)
    rows = []
    for name, each in served.items():
        seconds, start, memory = (median(getattr(one, part) for one in each) for part in ("seconds", "start", "memory"))
        speed = [f"{len(sources) / seconds:.1f}", f"{each[-1].tokens / seconds:.0f}"]
        rows.append([name, *speed, f"{memory:.0f}", f"{start:.1f}", f"{bleu[name]:.2f}" if name in bleu else "-"])
    return table(rows, ["search", "sentences/s", "tokens/s", "MiB", "start, s", "BLEU"]) + refused


def in_turns(
    checkpoint: Path, data: Path, split: str, beam: int, rounds: int, sizes: Sequence[int], length: int | None
) -> str:
    """Return a table of how many times as fast as CTranslate2 we translate batches of some sizes.

    Both are given each batch in turns, in one process, and the best and the median times of all batches are summed:
    a machine whose speed changes within seconds changes both.

    Args:
        checkpoint: a relpos_transformer's.
        data: its binarised data.
        split: test or valid.
        beam: of both searches.
        rounds: times that each batch is translated.
        sizes: sentences of a batch.
        length: symbols of each translation; None: as the search ends.

    Raises:
        UserError: the engine has not the position scheme.
    """
    search = Search(beam=beam) if length is None else Search(beam=beam, min_len=length, max_len_b=length)
    sources, _ = run_apart(_read, checkpoint, data, split)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for kind in (None, "int8"):
            folder = Path(name) / str(kind)
            run_apart(ct2.export, checkpoint, folder, kind, data, COMPARED_IN_TURNS)
            for size in sizes:
                times = run_apart(_both, (checkpoint, data, True, kind), folder, sources, search, rounds, size)
                ours, theirs = ([sum(map(of_rounds, one)) for of_rounds in (min, median)] for one in times)
                ratios = [f"{their / our:.2f}" for our, their in zip(ours, theirs, strict=True)]
                each = [f"{1000 * seconds[0] / len(sources):.2f}" for seconds in (ours, theirs)]
                rows.append([kind or "fp32", str(size), *ratios, *each])
    columns = ["weights", "sentences at once", "times as fast, best", "median", "ms a sentence", "CTranslate2's"]
    return table(rows, columns)


def _both(
    ours: tuple, theirs: Path, lines: Lines, search: Search, rounds: int, size: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the seconds of each batch's rounds by our search and by the engine, after one that is not counted."""
    translators = open_translator(*ours), open_translator(theirs, None, True, None)
    found: tuple[list[list[float]], list[list[float]]] = [], []
    for batch in batches([len(line) for line in lines], Batching(max_sentences=size)):
        given = [lines[number] for number in batch]
        times: tuple[list[float], list[float]] = [], []
        for _ in range(rounds + 1):
            for translator, seconds in zip(translators, times, strict=True):
                began = time.perf_counter()
                translator.translate(given, search)
                seconds.append(time.perf_counter() - began)
        for seconds, of_all in zip(times, found, strict=True):
            of_all.append(seconds[1:])
    return found


def run_apart(function: Callable, *arguments: object) -> Any:
    """Call a function in a new process, which shares no threads with this one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def _read(checkpoint: Path, data: Path, split: str) -> tuple[Lines, Lines]:
    """Return the sources and references of a split, as symbols."""
    task = load_translation(checkpoint, data)[1]
    task.load_dataset(split)
    pairs = [task.dataset(split)[number] for number in range(len(task.dataset(split)))]
    words, target = task.source_dictionary, task.target_dictionary
    sources = [[words[index] for index in pair["source"][:-1]] for pair in pairs]
    return sources, [[target[index] for index in pair["target"][:-1]] for pair in pairs]


def _translated(path: Path, data: Path | None, lines: Lines, beam: int, quantization: str | None = None) -> Served:
    """Translate with a checkpoint or an exported folder, in this process, which does nothing else."""
    entered = time.perf_counter()
    translator, found = open_translator(path, data, True, quantization), [[] for _ in lines]
    began = time.perf_counter()
    for batch in batches([len(line) for line in lines], Batching()):
        results = translator.translate([lines[number] for number in batch], Search(beam=beam))
        for number, (best, *_) in zip(batch, results, strict=True):
            found[number] = best.symbols
    seconds = time.perf_counter() - began
    return Served(seconds, began - entered, mebibytes("VmHWM"), found, _written(found))


Writes = Callable[[list[list[int]], int], None]  # of the ids of a batch, and the number of tokens to write


def _of_same_shape(
    function: Callable[[Any, Any, int], Writes],
    checkpoint: Path,
    data: Path,
    lines: Lines,
    lengths: list[int],
    beam: int,
) -> Served:
    """Translate with another library's untrained model, in this process, which does nothing else.

    Args:
        function: makes the model's search, of the checkpoint's options of the model, its task and the beam.
        checkpoint: whose shape it has.
        data: of the checkpoint.
        lines: sources, as symbols.
        lengths: symbols of their translations.
        beam: width of the search.
    """
    entered = time.perf_counter()
    model, task = load_translation(checkpoint, data)
    words, shape = task.source_dictionary, model.cfg
    del model
    search, tokens = function(shape, task, beam), 0
    began = time.perf_counter()
    for batch in batches([len(line) for line in lines], Batching()):
        longest = max(lengths[number] for number in batch)
        search([[*map(words.index, lines[number]), words.eos()] for number in batch], longest)
        tokens += len(batch) * (longest + 1)
    seconds = time.perf_counter() - began
    return Served(seconds, began - entered, mebibytes("VmHWM"), [[] for _ in lines], tokens)


def _of_fairseq(cfg: Any, task: Any, beam: int) -> Writes:
    """Return the search of fairseq's own transformer, untrained."""
    import torch
    from fairseq.models.transformer import TransformerConfig, TransformerModelBase
    from fairseq.sequence_generator import SequenceGenerator

    shape = TransformerConfig()
    for side in ("encoder", "decoder"):
        for part in ("embed_dim", "ffn_embed_dim", "layers", "attention_heads", "normalize_before"):
            setattr(getattr(shape, side), part, getattr(getattr(cfg, side), part))
    for name in ("share_all_embeddings", "share_decoder_input_output_embed", "activation_fn"):
        setattr(shape, name, getattr(cfg, name))
    shape.decoder.input_dim = shape.decoder.output_dim = shape.decoder.embed_dim
    model = TransformerModelBase.build_model(shape, task).eval()
    model.make_generation_fast_()

    def search(rows: list[list[int]], length: int) -> None:
        generator = SequenceGenerator([model], task.target_dictionary, beam, max_len_b=length, min_len=length)
        tokens = _padded(rows, left=True)
        generator.generate([model], {"net_input": {"src_tokens": tokens, "src_lengths": (tokens != 1).sum(1)}})

    return torch.inference_mode()(search)


def _of_marian(cfg: Any, task: Any, beam: int) -> Writes:
    """Return the search of transformers' Marian, untrained."""
    import torch

    transformers = require("transformers")
    sides = {
        **{f"{side}_layers": getattr(cfg, side).layers for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": getattr(cfg, side).ffn_embed_dim for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": getattr(cfg, side).attention_heads for side in ("encoder", "decoder")},
    }
    rows = len(task.target_dictionary)
    ends = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = transformers.MarianConfig(
        vocab_size=max(rows, len(task.source_dictionary)), d_model=cfg.encoder.embed_dim, **sides, **ends
    )
    model = transformers.MarianMTModel(config).eval()

    def search(rows: list[list[int]], length: int) -> None:
        tokens, forced = _padded(rows), {"min_new_tokens": length + 1, "max_new_tokens": length + 1}
        model.generate(tokens, attention_mask=(tokens != 1).long(), num_beams=beam, do_sample=False, **forced)

    return torch.inference_mode()(search)


def _padded(rows: list[list[int]], left: bool = False) -> Any:
    """Return rows of ids as (B, S), padded with 1."""
    import torch

    longest = max(map(len, rows))
    fill = [[1] * (longest - len(row)) for row in rows]
    return torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, fill, strict=True)])


def _fairseq(checkpoint: Path, data: Path, split: str, beam: int) -> Served:
    """Run fairseq-generate; its seconds are those of its own clock, which leaves out its start."""
    command = [*command_of("fairseq_cli.generate"), str(data), "--path", str(checkpoint)]
    command += ["--user-dir", str(PACKAGE), "--beam", str(beam), "--gen-subset", split, "--cpu"]
    command += ["--max-tokens", str(Batching.max_tokens), "--num-workers", "0"]
    command += ["--batch-size", str(Batching.max_sentences)]
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        done = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        memory = float("nan")
        while done.poll() is None:
            now = mebibytes("VmHWM", done.pid)
            memory = memory if now != now else now  # the last that was told
            time.sleep(0.1)
        whole = time.perf_counter() - began
        said.seek(0)
        output = said.read()
    speed = TIMED.search(output)
    if done.returncode or speed is None:
        raise ToolError(f"fairseq-generate failed: {(output.strip().splitlines() or ['no output'])[-1]}")
    found = re.findall(r"^H-(\d+)\t\S+\t(.*)$", output, re.M)
    lines = [line.split() for _, line in sorted(found, key=lambda pair: int(pair[0]))]
    seconds = len(lines) / float(speed[1])
    return Served(seconds, whole - seconds, memory, lines, _written(lines))


def _bleu(checkpoint: Path, data: Path, references: Lines, found: dict[str, Lines]) -> dict[str, float]:
    text = loading.load(checkpoint, data, True, "relpos translate").target
    wanted = [[text.decode(line) for line in references]]
    return {
        name: BLEU(force=True).corpus_score([text.decode(line) for line in lines], wanted).score
        for name, lines in found.items()
    }
