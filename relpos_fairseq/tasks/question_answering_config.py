"""Options of the task `question_answering`."""

from dataclasses import dataclass

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import MISSING

from relpos_fairseq.core.config import help_text as _help
from relpos_fairseq.data.answer_spans import LONG_QUESTION
from relpos_fairseq.data.squad import BAD_ANSWER
from relpos_fairseq.metrics.answer_scores import METRICS

SEPARATORS = ("auto", "1", "2")
UNANSWERABLE = ("auto", "yes", "no")


@dataclass
class QuestionAnsweringConfig(FairseqDataclass):
    """Files, windows, and how answers are chosen and scored."""

    data: str = _help(MISSING, "folder with dict.txt, the tokenizer, and SPLIT.json or .json.gz of every split")
    tokenizer_folder: str = _help("", "folder of the tokenizer, if it is not in the data folder")
    tokens_per_sample: int = _help(512, "tokens of a sample at most: question, context, <s>, </s>")
    doc_stride: int = _help(128, "pieces from the beginning of one window to that of the next")
    max_query_length: int = _help(64, "pieces of a question at most")
    on_long_question: ChoiceEnum(LONG_QUESTION) = _help(
        "fail",
        "what to do with a longer question: fail, truncate it, or drop it (from training; "
        "validation truncates it, as every question counts)",
    )
    on_bad_answer: ChoiceEnum(BAD_ANSWER) = _help(
        "drop",
        "what to do with an answer whose text is not at its offset: drop it, keep it at the "
        "nearest place where the text stands, or fail",
    )
    separators: ChoiceEnum(SEPARATORS) = _help(
        "auto", "</s> between question and context: auto is 1 (BERT) for WordPiece, else 2 (RoBERTa)"
    )
    max_answer_length: int = _help(30, "pieces of a predicted answer at most")
    n_best: int = _help(20, "answers that are kept, and starts and ends of a window that are paired")
    unanswerable: ChoiceEnum(UNANSWERABLE) = _help(
        "auto", "whether 'no answer' may be predicted; auto: where the file has such questions"
    )
    null_threshold: float = _help(
        0.0, "'no answer' is predicted if its score exceeds the best answer's by more than this"
    )
    metric: ChoiceEnum(METRICS) = _help(
        "squad", "normalisation of answers: SQuAD's (XQuAD, TyDiQA too), or MLQA's, by language"
    )
    language: str = _help(
        "auto", "language for --metric mlqa; auto: of the file's name (valid.de.json, test-context-de-question-en.json)"
    )
    span_head_name: str = _help("question_answering", "name of the span head")
