"""Translate with a folder of `relpos export ct2`: sentences in symbols in, CTranslate2's hypotheses out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from relpos_fairseq.inference.translator import Hypothesis, Search
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import sha256_of
from relpos_fairseq.io.packages import require
from relpos_fairseq.io.reading import Positive, read_json, reading
from relpos_fairseq.text.assets import TEXT_FOLDER, read_text

REPORT = "relpos.json"
LEAST = "4.8.3"
AGAIN = "export the checkpoint again"
BLANK = "<blank>"  # the engine's name of padding, which fairseq's search never chooses


class _Facts(TypedDict):
    languages: tuple[str, str]
    longest: Positive | None


class Facts(_Facts, total=False):
    """What an export says of itself in relpos.json."""

    longest_output: Positive | None
    files: dict[str, str]  # SHA-256 of every other file by its name


def engine() -> Any:
    """Import CTranslate2.

    Raises:
        UserError: it is absent or too old.
    """
    return require("ctranslate2", LEAST)


def load(folder: Path, cpu: bool) -> Ct2Translator:
    """Open a folder that `relpos export ct2` wrote.

    Raises:
        UserError: it is older than text/, another program's, or a file of it is another than was exported.
    """
    if not (folder / TEXT_FOLDER).is_dir() or not (folder / REPORT).is_file():
        raise UserError(f"{folder} has no {TEXT_FOLDER}/: {AGAIN}")
    facts: Facts = read_json(folder / REPORT, Facts, remedy=AGAIN)
    for name, sha256 in facts.get("files", {}).items():
        if not (folder / name).is_file() or sha256_of(folder / name) != sha256:
            raise UserError(f"{folder / name} is not the file that was exported, or missing: copy it again, or {AGAIN}")
    return Ct2Translator(folder, facts, cpu)


class Ct2Translator:
    """Translate sentences of symbols by CTranslate2's search; text becomes symbols as the checkpoint's.

    Args:
        folder: written by `relpos export ct2`.
        facts: its relpos.json.
        cpu: use no GPU.
    """

    def __init__(self, folder: Path, facts: Facts, cpu: bool) -> None:
        library = engine()
        device = "cuda" if not cpu and library.get_cuda_device_count() else "cpu"
        with reading(folder, "a whole folder of CTranslate2", AGAIN):
            self.engine = library.Translator(str(folder), device=device)
        self.source, self.target = (read_text(folder / TEXT_FOLDER, one) for one in facts["languages"])
        self.longest: int | None = facts["longest"]
        self.limit = facts.get("longest_output")

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """Return the best translations of each sentence.

        Scores are the engine's: its softmax leaves out what may not be chosen (padding, and </s>
        before the least length), and the </s> that fairseq forces at the limit is not counted.
        A trained model gives these next to no probability.

        Raises:
            UserError: an option that the engine has not.
        """
        if search.unkpen:
            raise UserError(f"--unkpen {search.unkpen}: CTranslate2 has none; leave it out")
        return decode(self.engine, batch, search, self.limit)


def decode(engine: Any, batch: Sequence[list[str]], search: Search, limit: int | None) -> list[list[Hypothesis]]:
    """Return the `search.nbest` best translations of each sentence, by CTranslate2's Translator.

    Args:
        engine: the Translator.
        batch: sentences in symbols.
        search: the options.
        limit: positions that the decoder has, the first of which reads the </s> that begins a sentence, or None.
    """
    longest = 1 + max(map(len, batch))  # with </s>, as fairseq counts
    allowed = int(search.max_len_a * longest + search.max_len_b)
    if limit is not None:
        allowed = min(allowed, limit - 1)
    results = engine.translate_batch(
        list(batch),
        beam_size=search.beam,
        num_hypotheses=search.nbest,
        length_penalty=search.lenpen,
        min_decoding_length=search.min_len,
        max_decoding_length=allowed,
        max_input_length=0,  # else the engine cuts sources at 1,024 and says nothing
        no_repeat_ngram_size=search.no_repeat_ngram_size,
        return_scores=True,
        suppress_sequences=[[BLANK]],
    )
    return [[Hypothesis(*pair) for pair in zip(one.hypotheses, one.scores, strict=True)] for one in results]
