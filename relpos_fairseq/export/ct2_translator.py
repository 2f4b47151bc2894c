"""An exported folder as `relpos translate` runs it: text by us, search by CTranslate2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import read_json
from relpos_fairseq.export.extras import require
from relpos_fairseq.inference.beside import FOLDER
from relpos_fairseq.inference.text import read_text
from relpos_fairseq.inference.translator import Hypothesis, Search

REPORT = "relpos.json"
LEAST = "4.8.3"
BLANK = "<blank>"  # the engine's name of padding, which fairseq's search never chooses


def load(folder: Path, cpu: bool) -> EngineTranslator:
    """Open a folder that `relpos export ct2` wrote.

    Raises:
        PreparationError: it is older than text/, or another program's.
    """
    facts = read_json(folder / REPORT) or {}
    if "languages" not in facts or not (folder / FOLDER).is_dir():
        raise PreparationError(f"{folder} has no {FOLDER}/: export the checkpoint again")
    return EngineTranslator(folder, facts, cpu)


class EngineTranslator:
    """CTranslate2's search over sentences in symbols.

    Args:
        folder: the engine's.
        facts: what the export wrote about it.
        cpu: use no GPU.
    """

    def __init__(self, folder: Path, facts: dict, cpu: bool) -> None:
        library = require("ctranslate2", "ct2", LEAST)
        device = "cuda" if not cpu and library.get_cuda_device_count() else "cpu"
        self.engine = library.Translator(str(folder), device=device)
        self.source, self.target = (read_text(folder / FOLDER, one) for one in facts["languages"])
        self.longest = facts["longest"]

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """Return the best translations of each sentence.

        Scores are the engine's: its softmax leaves out what may not be chosen (padding, and </s>
        before the least length), and the </s> that fairseq forces at the limit is not counted.
        A trained model gives these next to no probability.

        Raises:
            PreparationError: an option that the engine has not.
        """
        if search.unkpen:
            raise PreparationError(f"--unkpen {search.unkpen}: CTranslate2 has none; leave it out")
        return decode(self.engine, batch, search)


def decode(engine: Any, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
    """Return the `search.nbest` best translations of each sentence, by CTranslate2's Translator."""
    longest = 1 + max(map(len, batch))  # with </s>, as fairseq counts
    results = engine.translate_batch(
        list(batch),
        beam_size=search.beam,
        num_hypotheses=search.nbest,
        length_penalty=search.lenpen,
        min_decoding_length=search.min_len,
        max_decoding_length=int(search.max_len_a * longest + search.max_len_b),
        no_repeat_ngram_size=search.no_repeat_ngram_size,
        return_scores=True,
        suppress_sequences=[[BLANK]],
    )
    return [[Hypothesis(*pair) for pair in zip(one.hypotheses, one.scores, strict=True)] for one in results]
