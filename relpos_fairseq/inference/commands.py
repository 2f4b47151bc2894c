"""Run `relpos translate`, `sample`, `fill` and `answer`: lines of a file or standard input in, lines or JSON out."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from relpos_fairseq.inference.translator import Batching, Search, Translated, Translator, translate
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import open_text_out
from relpos_fairseq.io.lines import lines_of, read_lines

logger = logging.getLogger(__name__)
# A file that only one kind of exported folder has, and the module whose `load(folder, cpu)` opens such a folder.
ENGINES = {"model.bin": "relpos_fairseq.inference.ct2"}


@contextmanager
def writer(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line: at once to standard output, or to a file that appears when it is whole."""
    if path is None:
        yield lambda line: print(line, flush=True)
        return
    with open_text_out(path) as file:
        yield lambda line: file.write(f"{line}\n")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def quietly() -> None:
    """Silence fairseq's log of loading a model; warnings stay."""
    for name in ("fairseq", "relpos_fairseq"):
        logging.getLogger(name).setLevel(logging.WARNING)


def open_translator(
    path: Path,
    data: Path | None = None,
    cpu: bool = False,
    quantization: str | None = None,
    languages: tuple[str | None, str | None] = (None, None),
) -> Translator:
    """Return the translator of a checkpoint or of an exported folder.

    Args:
        path: a checkpoint's file, or the folder of an export.
        data: data folder of a checkpoint that has no text/ beside it.
        cpu: use no GPU.
        quantization: `int8` or `bf16` of a checkpoint, or None.
        languages: the source's and the target's, of a checkpoint that translates between several.

    Raises:
        UserError: it is neither, or no translation model.
    """
    for file, module in ENGINES.items():
        if (path / file).is_file():
            if quantization is not None:
                raise UserError(f"--quantization {quantization}: {path} has the weights that it was exported with")
            if languages != (None, None):
                raise UserError(f"--source-lang, --target-lang: {path} translates between the languages of its export")
            return import_module(module).load(path, cpu)
    if path.is_dir():
        if (path / "config.json").is_file() or any(path.glob("*.onnx")):
            raise UserError(
                f"{path} is an export that relpos translate does not run: name a folder of relpos export ct2, "
                f"or a checkpoint"
            )
        raise UserError(f"{path} is a folder: name the checkpoint in it")
    from relpos_fairseq.inference.checkpoints import loading  # with fairseq, which exports do without

    return loading.load_translator(path, data, cpu, quantization, languages)


def translate_file(args: Any) -> None:
    """Run `relpos translate`."""
    quietly()
    names = ("beam", "nbest", "lenpen", "unkpen", "max_len_a", "max_len_b", "no_repeat_ngram_size")
    search = Search(**{name: getattr(args, name) for name in names})
    typed = args.file is None and sys.stdin.isatty()
    batching = Batching(
        max_tokens=args.max_tokens,
        buffer=args.buffer or (1 if typed else Batching.buffer),
        cut=args.on_long_line == "cut",
    )
    show = _show_json if args.jsonl else _show_scores if args.scores or args.nbest > 1 else _show
    languages = args.source_lang, args.target_lang
    translator = open_translator(args.checkpoint, args.data, args.cpu, args.quantization, languages)
    with writer(args.out) as write:
        for one in translate(translator, lines_of(args.file), search, batching):
            for line in show(one):
                write(line)


def _show(one: Translated) -> Iterator[str]:
    yield one.texts[0]


def _show_scores(one: Translated) -> Iterator[str]:
    for text, score in zip(one.texts, one.scores, strict=True):
        yield f"{one.number}\t{score:.4f}\t{text}"


def _show_json(one: Translated) -> Iterator[str]:
    found = [{"text": t, "score": s} for t, s in zip(one.texts, one.scores, strict=True)]
    yield as_json({"line": one.number, "source": one.source, "hypotheses": found})


def sample_text(args: Any) -> None:
    """Run `relpos sample`."""
    quietly()
    from relpos_fairseq.inference.checkpoints import causal_lm

    choice = causal_lm.Choice(args.top_k, args.top_p, args.temperature, args.seed)
    trained = causal_lm.open_model(args.checkpoint, args.data, args.cpu, args.quantization)
    prompt = "\n".join(lines_of(args.prompt_file)) if args.prompt_file else args.prompt
    start = causal_lm.Continuation(trained, args.samples, args.mem_len, args.context)
    words, symbols = trained.task.source_dictionary, causal_lm.ids_of(trained, prompt)
    if unknown := symbols.count(words.unk()):
        logger.warning("the prompt: %d of its %d symbols are unknown to the model", unknown, len(symbols) - 1)
    streams = args.samples == 1 and not args.jsonl
    if streams:
        print(prompt, end="", flush=True)
    try:
        for sample in causal_lm.texts(trained, start, prompt, args.tokens, args.lines, choice, streams):
            if args.jsonl:
                print(as_json(sample))
            elif not streams:
                print(f"== {sample['sample']} ==\n{prompt}{sample['text']}", flush=True)
    except KeyboardInterrupt:
        if streams:  # what is said of it has a line of its own
            print(flush=True)
        raise


def fill_lines(args: Any) -> None:
    """Run `relpos fill`."""
    quietly()
    from relpos_fairseq.inference.checkpoints.loading import fill, open_masked

    hub = open_masked(args.checkpoint, args.data, args.cpu, args.quantization)
    with writer(args.out) as write:
        for number, line in enumerate(lines_of(args.file), start=1):
            found = fill(hub, line, number, args.top_k) if line.strip() else []  # as translate passes over such lines
            if args.jsonl:
                write(as_json({"line": number, "source": line, "filled": found}))
                continue
            for one in found:
                write(f"{number}\t{one['probability']:.4f}\t{one['piece']}\t{one['text']}")


def answer_questions(args: Any) -> None:
    """Run `relpos answer`."""
    quietly()
    context = _context(args.context)
    questions = [*args.questions, *(read_lines(args.file) if args.file else [])]
    if not questions:
        raise UserError("give a QUESTION, or --file with one a line")
    from relpos_fairseq.inference.checkpoints.loading import answer, load

    trained = load(args.checkpoint, args.data, args.cpu, "relpos answer", args.quantization)
    with writer(args.out) as write:
        for one in answer(trained, context, questions, args.no_answer, args.nbest):
            if args.jsonl:
                write(as_json(one))
                continue
            for best in one["answers"] if args.nbest > 1 else one["answers"][:1]:
                shown = f"{best['probability']:.4f}\t" if args.nbest > 1 else ""
                write(f"{shown}{best['text']}")


def _context(given: str) -> str:
    """Return the text of a file, of standard input, or the argument itself; a lone word must be a file."""
    if given == "-" or Path(given).is_file():
        return "\n".join(lines_of(Path(given)))
    if not any(char.isspace() for char in given):
        raise UserError(f"{given} is no file, and one word is no context")
    return given
