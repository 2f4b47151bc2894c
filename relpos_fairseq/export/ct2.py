"""Export a translation checkpoint to CTranslate2, compared with the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.sequence_generator import SequenceGenerator
from sacrebleu.metrics import BLEU
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from relpos_fairseq.export.ct2_spec import transformer_spec
from relpos_fairseq.formats.closing_check import IMPOSSIBLE, TOLERANCE, agree, measured
from relpos_fairseq.inference.ct2 import BLANK, REPORT, decode, engine
from relpos_fairseq.inference.model_card import write_export_card
from relpos_fairseq.inference.translator import Batching, Search, batches
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, described, sha256_of, write_json
from relpos_fairseq.io.progress import progress
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text.assets import copy_assets

BEAM, MAX_LENGTH = 4, Search.max_len_b
SUPPRESSED = -1e30  # the engine's logits of symbols that may not be chosen are lower
LOGITS, LEAST_STEPS = 32, 16  # sentences whose logits are compared, and steps of each


def load_translation(checkpoint: Path, data: Path | None) -> tuple[Any, Any]:
    """Load a translation checkpoint's model, and its task with dictionaries.

    Args:
        checkpoint: the file.
        data: folder of dictionaries; None: the one that the checkpoint was trained on, which has
            the validation set, or else the text/ beside the checkpoint.

    Raises:
        UserError: no such folder, no model with two dictionaries, or a task that writes more than words into its texts.
    """
    saved = SavedModel.open(checkpoint)
    if more := saved.framing:
        raise UserError(
            f"{checkpoint} is of task {saved.options.task_name}, whose texts have {more}, which CTranslate2 would not "
            f"write: relpos export onnx exports it"
        )
    if data is None:
        data = Path(saved.options.data)
        if not saved.options.data or not any(data.glob("dict*.txt")):
            data = saved.find_text(None)
    model, task = saved.build_anyway(data)
    if getattr(task, "source_dictionary", None) is None or not hasattr(model, "encoder"):
        raise UserError(f"{checkpoint} holds a {type(model).__name__}: no translation model")
    return model, task


def validation_sentences(task: Any, count: int, limit: int | None) -> tuple[list[Tensor], str]:
    """Return at most `count` source sentences of at most `limit` symbols, each ending in eos, and a description.

    Random ones serve where the data has no validation set, or none of its sentences is so short.
    """
    limit = limit or MAX_LENGTH
    with suppress(FileNotFoundError):
        task.load_dataset("valid")
        found = task.dataset("valid")
        every = (found[index]["source"] for index in range(len(found)))
        if chosen := list(islice((source for source in every if len(source) <= limit), count)):
            return chosen, f"{len(chosen)} sentences of the validation set"
    words = task.source_dictionary
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(min(2, limit - 1), min(40, limit), (min(count, 32),), generator=generator).tolist()
    drawn = [torch.randint(4, len(words), (n,), generator=generator) for n in lengths]
    end = torch.tensor([words.eos()])
    return [torch.cat([part, end]) for part in drawn], f"{len(drawn)} random sentences"


@torch.inference_mode()
def translate(model: Any, task: Any, rows: Sequence[Tensor]) -> list[list[str]]:
    """Translate sentences by fairseq's search; return the symbols of each one's best hypothesis."""
    words = task.target_dictionary
    search = SequenceGenerator([model], words, beam_size=BEAM, max_len_b=MAX_LENGTH)

    def best_of(part: list[Tensor]) -> list[list[str]]:
        source = pad_sequence(part, True, task.source_dictionary.pad(), padding_side="left")
        lengths = torch.tensor([len(row) for row in part])
        sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
        found = (best[0]["tokens"] for best in search.generate([model], sample))
        return [[words[n] for n in utils.strip_pad(one, words.pad()) if n != words.eos()] for one in found]

    return in_batches(rows, best_of, "translate")


def in_batches(
    rows: Sequence[Any], best_of: Callable[[list[Any]], list[list[str]]], description: str
) -> list[list[str]]:
    """Translate sentences in batches of similar length; return symbols in the sentences' order.

    Args:
        rows: the sentences.
        best_of: translates a batch.
        description: of the progress bar.
    """
    found: list[list[str]] = [[] for _ in rows]
    with progress(total=len(rows), description=description, unit="sentences") as bar:
        for batch in batches([len(row) for row in rows], Batching(max_sentences=64)):
            for number, symbols in zip(batch, best_of([rows[n] for n in batch]), strict=True):
                found[number] = symbols
            bar.update(len(batch))
    return found


@dataclass(frozen=True)
class Comparison:
    """Differences between an exported model and its checkpoint.

    Args:
        text: description of the sentences.
        logits: largest difference of a logit, teacher-forced on the engine's own greedy search.
        size: largest logit.
        steps: number of tokens whose logits were compared.
        same: sentences whose translations are equal.
        sentences: number of sentences that were translated.
        bleu: of the engine's translations against ours.
    """

    text: str
    logits: float
    size: float
    steps: int
    same: int
    sentences: int
    bleu: float

    def line(self) -> str:
        return (
            f"{self.text}: logits of {self.steps:,} steps differ by at most {self.logits:.1e}; "
            f"{self.same:,} of {self.sentences:,} translations (beam {BEAM}) are equal, BLEU of "
            f"one against the other {self.bleu:.2f}"
        )


def export(checkpoint: Path, out: Path, quantization: str | None, data: Path | None, count: int) -> Comparison:
    """Export a translation checkpoint to a folder, which appears only if its logits equal the checkpoint's.

    Args:
        checkpoint: a `relpos_transformer`'s.
        out: new folder.
        quantization: `int8` and so on, as CTranslate2 names them, or None for fp32.
        data: folder of its data; None: the one that it was trained on.
        count: sentences to compare.

    Raises:
        UserError: what CTranslate2 cannot hold, or a difference in logits.
    """
    if out.exists():
        raise UserError(f"{out} exists: remove it, or name another folder")
    engine()
    model, task = load_translation(checkpoint, data)
    with atomic_folder(out) as folder:
        limits = write(model, task.source_dictionary, task.target_dictionary, folder, None)
        compared = compare(folder, model, task, count, limits)
        print(f"fp32: {compared.line()}", flush=True)
        if not agree(compared.logits, compared.size):
            raise UserError(
                f"{checkpoint}: CTranslate2's logits differ by {compared.logits:.1e} (allowed: {TOLERANCE:.0e}, beside "
                f"values up to {compared.size:.3g}), so nothing was written; relpos export onnx exports it"
            )
        if quantization:
            write(model, task.source_dictionary, task.target_dictionary, folder, quantization)
            compared = compare(folder, model, task, count, limits)
            print(f"{quantization}: {compared.line()}", flush=True)
        copy_assets(Path(task.cfg.data.split(":")[0]), folder)
        facts = {
            "checkpoint": {"name": checkpoint.name, "sha256": sha256_of(checkpoint)},
            "positions": {name: getattr(model, name).positions.plan.describe() for name in ("encoder", "decoder")},
            "quantization": quantization or "float32",
            "ctranslate2": engine().__version__,
            "comparison": asdict(compared),
            "languages": [task.cfg.source_lang, task.cfg.target_lang],
            "longest": limits.source and limits.source - 1,  # without </s>
            "longest_output": limits.target,
            "files": {name: sha256 for name, (_, sha256) in described(folder).items()},
        }
        write_json(folder / REPORT, facts)
        write_export_card(checkpoint, folder, "CTranslate2", card_of(facts))
    return compared


def card_of(facts: dict) -> dict[str, object]:
    """Return rows of the model card: what relpos.json records, without nesting."""
    rows = {name: facts[name] for name in ("quantization", "ctranslate2")}
    rows |= {f"{side}: position scheme": said for side, said in facts["positions"].items()}
    rows |= {f"comparison: {name}": value for name, value in facts["comparison"].items()}
    return rows | {"checkpoint's sha256": facts["checkpoint"]["sha256"]}


@dataclass(frozen=True)
class Limits:
    """The positions for which the engine has rows, </s> included; None: any length."""

    source: int | None
    target: int | None


def write(model: Any, source: Any, target: Any, folder: Path, quantization: str | None) -> Limits:
    """Write a model in CTranslate2's format, and return what its tables of positions allow."""
    spec = transformer_spec(model, source, target)
    tables = (getattr(side, "position_encodings", None) for side in (spec.encoder, spec.decoder))
    encodings = (getattr(table, "encodings", None) for table in tables)  # a word in place of a table that is not there
    limits = Limits(*(None if one is None or isinstance(one, str) else len(one) for one in encodings))
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    return limits


def compare(folder: Path, model: Any, task: Any, count: int, limits: Limits) -> Comparison:
    """Compare a written folder with its checkpoint on `count` sentences: logits and translations."""
    rows, text = validation_sentences(task, count, limits.source)
    words = task.source_dictionary
    symbols = [[words[index] for index in row[:-1]] for row in rows]
    translator = engine().Translator(str(folder), device="cpu", intra_threads=torch.get_num_threads())
    apart = compare_logits(translator, model, task.target_dictionary, words, rows[:LOGITS], limits.target)
    ours = translate(model, task, rows)
    theirs = in_batches(symbols, lambda part: best_of(translator, part, limits.target), "CTranslate2")
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    joined = [[" ".join(line) or "-" for line in system] for system in (theirs, ours)]
    # With effective order, since translations may be shorter than BLEU's n-grams.
    bleu = BLEU(tokenize="none", force=True, effective_order=True).corpus_score(joined[0], [joined[1]]).score
    return Comparison(text, *apart, same, len(rows), bleu)


def best_of(translator: Any, part: list[list[str]], limit: int | None = None) -> list[list[str]]:
    """Translate a batch by the engine, under fairseq's rules; return the symbols of each best hypothesis."""
    return [found[0].symbols for found in decode(translator, part, Search(beam=BEAM), limit)]


@torch.inference_mode()
def compare_logits(
    translator: Any, model: Any, target: Any, source: Any, rows: Sequence[Tensor], limit: int | None = None
) -> tuple[float, float, int]:
    """Return the largest difference of logits along the engine's greedy search, the largest, and the number of steps.

    The engine decodes token by token with its cache; the checkpoint reads the chosen tokens in one pass.
    """
    symbols = [[source[index] for index in row[:-1]] for row in rows]
    found = translator.translate_batch(
        symbols,
        beam_size=1,
        min_decoding_length=min(LEAST_STEPS, limit or MAX_LENGTH),
        max_decoding_length=min(MAX_LENGTH, limit or MAX_LENGTH),
        max_input_length=0,
        return_logits_vocab=True,
        return_end_token=True,
        suppress_sequences=[[BLANK]],
    )
    largest, size, steps = 0.0, 0.0, 0
    for row, result in zip(rows, found, strict=True):
        theirs = torch.from_numpy(np.array(result.logits[0])).view(len(result.logits[0]), -1)
        chosen = [target.index(word) for word in result.hypotheses[0]]
        before = torch.tensor([[target.eos(), *chosen]])[:, : len(theirs)]
        ours = model(row[None], None, before)[0][0].float()
        ours = ours.masked_fill(theirs < SUPPRESSED, 2 * IMPOSSIBLE)  # what may not be chosen has none there
        apart, own = measured(theirs, ours)
        largest, size, steps = max(largest, apart), max(size, own), steps + len(theirs)
    return largest, size, steps
