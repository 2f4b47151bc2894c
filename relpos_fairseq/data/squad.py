"""Read questions from SQuAD v1.1, SQuAD v2.0, XQuAD, MLQA and TyDiQA-GoldP files (one format).

Whether a question has an answer is decided by its answers, as by SQuAD's own evaluate-v2.0, whatever `is_impossible`
says; ids, offsets and flags of another type are taken for what they say.  Both are counted in a warning.
Errors name the file and the id.  A file that is not of SQuAD's format is an error; an answer whose text does not stand
at its offset is counted and, by choice, kept, dropped or an error.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from relpos_fairseq.io.archives import unpacked
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import parse_json, reading

logger = logging.getLogger(__name__)
BAD_ANSWER = ("drop", "keep", "fail")
_NAMED = 5  # how many ids a message names
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False, "": False, "none": False}
# TyDiQA's ids begin with the name of the language.
_TYDI_CODES = dict(
    pair.split(":")
    for pair in "arabic:ar bengali:bn english:en finnish:fi indonesian:id japanese:ja korean:ko russian:ru swahili:sw "
    "telugu:te thai:th".split()
)
_TYDI = re.compile(f"({'|'.join(_TYDI_CODES)})-")


@dataclass(frozen=True)
class Answer:
    """A gold answer: its text, and the character of the context at which it begins."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context."""

    id: str  # unique in a file
    text: str
    context: int  # number of the context in its file
    # gold answers that stand at their offsets; none for an unanswerable question
    answers: tuple[Answer, ...]
    gold: tuple[str, ...]  # texts of all its gold answers in the file, which the metric compares with
    answerable: bool = True
    article: int = 0  # number of the article in its file
    language: str = ""  # if the id names it (TyDiQA), else empty


@dataclass
class QuestionFile:
    """The questions and contexts of a file."""

    path: Path
    contexts: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)  # in the file's order
    # for each answer whose text is not at its offset: the id, and the text at that offset
    bad_answers: list[str] = field(default_factory=list)

    @property
    def unanswerable(self) -> bool:
        """True if a question has no answer, as in SQuAD v2.0."""
        return any(not question.answerable for question in self.questions)

    @property
    def articles(self) -> int:
        return 1 + max((question.article for question in self.questions), default=-1)


def split_name(path: str | Path) -> str:
    """Return a file's name without .json or .json.gz."""
    return Path(path).name.removesuffix(".gz").removesuffix(".json")


class _Text(TypedDict):
    text: str


class _Answer(_Text, total=False):
    answer_start: int | float | str | None  # an integer, once read


class _Asked(TypedDict):
    id: str | int | float  # a text, once read
    question: str


class _Entry(_Asked, total=False):
    answers: list[_Answer] | None  # a list, once read
    is_impossible: bool | int | float | str | None  # whether there are no answers, once read


class _Paragraph(TypedDict):
    context: str
    qas: list[_Entry]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class Squad(TypedDict):
    """The content of a file of questions."""

    data: list[_Article]


def read_squad(path: Path) -> Squad:
    """Return the content of a file of questions, plain or .gz; ids, offsets and flags are as in SQuAD's own files.

    Raises:
        UserError: it is not of SQuAD's format, or has a question of which nothing says whether it has an answer.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[Squad, dict[str, list[str]]]:
    """Return the content, and the ids of the questions with what SQuAD's own files have not, by what it is."""
    if not path.exists():
        raise UserError(f"no such file of questions: {path}")
    with reading(path, "SQuAD's format"):
        content = parse_json(unpacked(path) if path.suffix == ".gz" else path.read_bytes(), Squad)
    odd: dict[str, list[str]] = {}
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                for what in _mended(entry, path):
                    odd.setdefault(what, []).append(str(entry["id"]))
    return content, odd


def _mended(entry: _Entry, path: Path) -> Iterator[str]:
    """Give a question's id, offsets and flag their types, and yield what it has that SQuAD's own have not.

    Raises:
        UserError: it has neither answers nor a flag.
    """
    if not isinstance(name := entry["id"], str):
        entry["id"] = str(int(name)) if name == int(name) else str(name)
        yield "ids that are numbers: taken as their digits"
    said = entry.get("is_impossible")
    flag = said if isinstance(said, bool) or said is None else _FLAGS.get(str(_whole(said, said)).strip().lower())
    if flag is None and said is not None:
        raise UserError(f"{path}: id {entry['id']!r}: is_impossible must be true or false, got {said!r}")
    if "answers" not in entry and not flag:
        raise UserError(
            f"{path}: id {entry['id']!r} has no answer and is not marked is_impossible (a test set without "
            f"answers cannot be scored)"
        )
    answers = entry["answers"] = entry.get("answers") or []
    starts = [answer.get("answer_start") for answer in answers]
    for answer, start in zip(answers, starts, strict=True):
        answer["answer_start"] = _whole(start, -1)
    if "is_impossible" in entry or not answers:
        entry["is_impossible"] = not answers
    if not all(isinstance(start, int) for start in starts):
        yield (
            "questions with an answer_start that is no whole number of JSON: taken as the number that it says, or as "
            "unknown"
        )
    if not isinstance(said, bool | None):
        yield "questions whose is_impossible is neither true nor false: taken as what it says"
    if flag and answers:
        yield ("questions with answers that are marked is_impossible: taken as answerable, as the official script does")
    if not flag and not answers:
        yield (
            "questions without an answer that are not marked is_impossible: taken as unanswerable, as the official "
            "script does"
        )


def _whole(value: object, otherwise: Any) -> Any:
    """Return the whole number that a value says, such as `403`, `403.0` or `"403"`; `otherwise` of anything else."""
    with suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return int(number) if number == int(number) else otherwise
    return otherwise


def read_questions(path: str | Path, on_bad_answer: str = "drop") -> QuestionFile:
    """Read a file of SQuAD's format.

    Args:
        path: the .json or .json.gz.
        on_bad_answer: what to do with an answer whose text is not at its offset: "drop" the answer, "keep" it at the
            nearest place of its text (dropped if there is none), or "fail".  The metric always compares with the
            answer's text as given.

    Raises:
        ValueError: the file is not of SQuAD's format, repeats an id, has an answerable question without an answer, or
            has a bad answer and `on_bad_answer` is "fail".
    """
    if on_bad_answer not in BAD_ANSWER:
        raise ValueError(f"on_bad_answer must be one of {BAD_ANSWER}, got {on_bad_answer!r}")
    path = Path(path)
    found = QuestionFile(path)
    seen: set[str] = set()
    content, odd = _read(path)
    articles = enumerate(content["data"])
    for article, paragraph in ((number, one) for number, several in articles for one in several["paragraphs"]):
        found.contexts.append(paragraph["context"])
        for entry in paragraph["qas"]:
            question = _question(entry, found, article, on_bad_answer)
            if question.id in seen:
                raise ValueError(f"{path}: id {question.id!r} occurs twice: ids must be unique")
            seen.add(question.id)
            found.questions.append(question)
    for what, names in odd.items():
        logger.warning(
            "%s: %d %s (%s%s)", path, len(names), what, ", ".join(names[:_NAMED]), ", ..." * (len(names) > _NAMED)
        )
    if not found.questions:
        raise ValueError(f"{path} holds no question")
    if found.bad_answers:
        _report_bad(found, on_bad_answer)
    return found


def _report_bad(found: QuestionFile, on_bad_answer: str) -> None:
    message = (
        f"{found.path}: {len(found.bad_answers)} answers whose text is not at its offset "
        f"({'; '.join(found.bad_answers[:_NAMED])}{'; ...' if len(found.bad_answers) > _NAMED else ''})"
    )
    if on_bad_answer == "fail":
        raise ValueError(f"{message}: mend them, or choose --on-bad-answer drop or keep")
    done = {"drop": "dropped", "keep": "kept at the nearest place where the text stands"}
    logger.warning("%s: %s", message, done[on_bad_answer])


def _question(entry: _Entry, found: QuestionFile, article: int, on_bad_answer: str) -> Question:
    name = entry["id"]
    answers, gold = [], []
    for one in entry["answers"]:
        answer = Answer(one["text"], one["answer_start"])
        gold.append(answer.text)
        placed = _placed(answer, found, name, on_bad_answer)
        if placed is not None:
            answers.append(placed)
    said = _TYDI.match(name)
    return Question(
        id=name,
        text=entry["question"],
        context=len(found.contexts) - 1,
        answers=tuple(answers),
        gold=tuple(gold),
        answerable=bool(gold),
        article=article,
        language=_TYDI_CODES[said.group(1)] if said else "",
    )


def _placed(answer: Answer, found: QuestionFile, name: str, on_bad_answer: str) -> Answer | None:
    """Return an answer at the place of its text; None if it is dropped."""
    context = found.contexts[-1]
    start, end = answer.start, answer.start + len(answer.text)
    if start >= 0 and answer.text.strip() and context[start:end] == answer.text:
        return answer
    stands = context[max(start, 0) : max(end, 0)]
    found.bad_answers.append(f"id {name!r}: {answer.text!r} at {start}, where {stands!r} stands")
    if on_bad_answer != "keep" or not answer.text.strip():
        return None
    places = [match.start() for match in re.finditer(re.escape(answer.text), context)]
    if not places:
        return None
    return Answer(answer.text, min(places, key=lambda place: abs(place - start)))
