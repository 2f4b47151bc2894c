"""Which question answering files of XTREME's there are, by data set and language."""

from __future__ import annotations

import re
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError

COMPRESSED = r"\.json(\.gz)?"
# A question and its context are in one language, as in XTREME.
NAMES = {
    "XQuAD": re.compile(rf"xquad\.(?P<language>\w\w){COMPRESSED}"),
    "MLQA": re.compile(rf"(?P<split>dev|test)-context-(?P<language>\w\w)-question-(?P=language){COMPRESSED}"),
    "TyDiQA-GoldP": re.compile(rf"tydiqa([.-]goldp)?[.-](dev[.-])?(?P<language>[a-z]+)([.-]dev)?{COMPRESSED}"),
}
SPOKEN = {
    "arabic": "ar",
    "bengali": "bn",
    "english": "en",
    "finnish": "fi",
    "indonesian": "id",
    "korean": "ko",
    "russian": "ru",
    "swahili": "sw",
    "telugu": "te",
}
METRICS = {"XQuAD": "squad", "MLQA": "mlqa", "TyDiQA-GoldP": "squad"}


def question_files(name: str, folder: Path) -> dict[str, Path]:
    """Language to file, of a folder and its subfolders; of MLQA the test set where there are both.

    Raises:
        PreparationError: there is none.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        match = NAMES[name].fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        language = SPOKEN.get(match["language"], match["language"])
        if language in ("dev", "train"):
            continue  # all languages in one file: the files by language say the same
        if match.groupdict().get("split") != "dev" or language not in found:
            found[language] = path
    if not found:
        raise PreparationError(f"{folder} has no file of {name}'s, such as {example(name)}")
    return found


def example(name: str) -> str:
    return {"XQuAD": "xquad.de.json", "MLQA": "test-context-de-question-de.json", "TyDiQA-GoldP": "tydiqa.ar.dev.json"}[
        name
    ]
