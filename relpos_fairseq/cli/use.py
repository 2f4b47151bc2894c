"""`relpos translate|sample|fill|answer|classify|score`: trained models on raw text, and scores of what they wrote."""

from collections.abc import Sequence
from dataclasses import dataclass

from relpos_fairseq.cli.command import command
from relpos_fairseq.io.options import InFile, InFolder, InPath, InText, OutFile, argument, flag, option

OUT = "write here, whole or not at all (standard output)"


@dataclass(kw_only=True)
class OnText:
    """The checkpoint that reads or writes plain text, and how it is run."""

    checkpoint: InFile = argument(metavar="CHECKPOINT")
    data: InFolder | None = option(None, "data folder, where the checkpoint has no text/ beside it")
    cpu: bool = flag("no GPU")
    quantization: str | None = option(
        None,
        "of the linear layers on a CPU: half the memory, faster, scores differ by about a hundredth",
        choices=("int8", "bf16"),
    )


@command("translate", "raw text through a trained model: lines in, lines out")
class Translate(OnText):
    """Translate raw text: lines in, lines out, in their order.

        relpos translate checkpoints/checkpoint_best.pt < in.txt > out.txt
        relpos translate checkpoints/checkpoint_best.pt in.txt --out out.txt --beam 4 --nbest 4
        relpos translate checkpoints/checkpoint_best.pt in.txt --jsonl

    Units, Moses' normalisation and dictionaries are those of training, which lie in text/ beside the
    checkpoint; of an older checkpoint --data names the data folder. Options of the search are
    fairseq-generate's, and so are the translations. With --scores or --nbest a line is its number, the
    score (log-probability in nats, divided by length to the power of --lenpen) and the text, parted by
    tabs; with --jsonl it is {"line", "source", "hypotheses": [{"text", "score"}]}.
    --source-lang and --target-lang choose a pair of a checkpoint that translates between several.
    """

    checkpoint: InPath = argument("or the folder of an export", metavar="CHECKPOINT")
    file: InFile | None = argument("a sentence a line (standard input)", nargs="?", metavar="FILE", default=None)
    out: OutFile | None = option(None, OUT)
    beam: int = option(5, "default: %(default)s", least=1)
    nbest: int = option(1, "translations of each line", metavar="N", least=1)
    lenpen: float = option(1.0, "above 1 favours longer ones (%(default)s)")
    unkpen: float = option(0.0, "above 0 makes <unk> rarer (%(default)s)")
    max_len_a: float = option(0.0, "a of the length limit ax + b (%(default)s)", least=0)
    max_len_b: int = option(200, "b of it (%(default)s)")
    no_repeat_ngram_size: int = option(0, "no N-gram twice", metavar="N", least=0)
    scores: bool = flag("print numbers and scores as well")
    jsonl: bool = flag("print a JSON object a line")
    source_lang: str | None = option(None, "of a checkpoint of several languages", metavar="LANG")
    target_lang: str | None = option(None, "of it", metavar="LANG")
    on_long_line: str = option("fail", "default: %(default)s", choices=("fail", "cut"))
    max_tokens: int = option(4096, "symbols of a batch (%(default)s)", least=1)
    buffer: int | None = option(None, "lines sorted together (8192; 1 on a terminal)", metavar="N", least=1)

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.inference.commands import translate_file

        translate_file(self)


@command("sample", "continue a text by a language model, with memory of any length")
class Sample(OnText):
    """Continue a text by a language model, as it is drawn.

        relpos sample checkpoints/checkpoint_best.pt --prompt "Once upon a time" --top-p 0.95
        relpos sample checkpoints/checkpoint_best.pt --prompt-file book.txt --mem-len 1600 --tokens 2000
        relpos sample checkpoints/checkpoint_best.pt --samples 8 --lines 1 --jsonl

    The prompt is plain text; words, pieces, characters or bytes are made of it as in training. A model
    with memory reads it whole, segment by segment, and draws with --mem-len of memory; a model without
    sees --context symbols, and goes on from the newer half when they are full. One sample is printed
    symbol by symbol, several when they are done; --jsonl prints {"sample", "prompt", "text", "nats",
    "symbols"}. The same seed gives the same text.
    """

    prompt: str = option("", "text to continue (default: none)", exclusive=1)
    prompt_file: InFile | None = option(None, "its file; - standard input", metavar="FILE", exclusive=1)
    tokens: int = option(200, "symbols to draw (%(default)s)", metavar="N", least=1)
    lines: int | None = option(None, "stop after so many ends of lines", metavar="N", least=1)
    samples: int = option(1, "texts to draw (%(default)s)", metavar="N", least=1)
    top_k: int = option(0, "of the k likeliest symbols (0: all)", least=0)
    top_p: float = option(1.0, "of the likeliest with this probability (1: all)", above=0, most=1)
    temperature: float = option(1.0, "0 takes the likeliest (%(default)s)", least=0)
    seed: int = option(1, "of the draws (%(default)s)")
    mem_len: int | None = option(None, "tokens of memory (as trained)", metavar="N", least=0)
    context: int | None = option(None, "tokens seen without memory (as trained)", metavar="N", least=1)
    jsonl: bool = flag("print a JSON object a sample")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.inference.commands import sample_text

        sample_text(self)


@command("fill", "the likeliest words for <mask>, by a masked language model")
class Fill(OnText):
    """Fill each <mask> of each line by a pretrained masked language model.

        echo "The capital of France is <mask>." | relpos fill checkpoints/checkpoint_best.pt
        relpos fill checkpoints/checkpoint_best.pt lines.txt --top-k 10 --jsonl

    Prints the line's number, a probability, the piece and the whole line, parted by tabs, the best
    first; with --jsonl {"line", "source", "filled": [{"text", "probability", "piece"}]}. A line of
    several <mask> is filled one after the other, and the JSON objects name the "mask" too.
    """

    file: InFile | None = argument("a text a line (standard input)", nargs="?", metavar="FILE", default=None)
    out: OutFile | None = option(None, OUT)
    top_k: int = option(5, "pieces a line (%(default)s)", metavar="K", least=1)
    jsonl: bool = flag("print a JSON object a line")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.inference.commands import fill_lines

        fill_lines(self)


@command("answer", "answers to questions about a text")
class Answer(OnText):
    """Answer questions about a text by a model that was trained on question answering.

        relpos answer checkpoints/checkpoint_best.pt article.txt "Who wrote it?" "When?"
        relpos answer checkpoints/checkpoint_best.pt - --file questions.txt --jsonl < article.txt

    CONTEXT is a file, - for standard input, or the text itself. Prints an answer a line; with --nbest
    its probability as well; with --jsonl {"question", "answers": [{"text", "probability"}]}. An empty
    answer means that there is none.
    """

    context: InText = argument("a file, - or the text itself", metavar="CONTEXT")
    questions: list[str] = argument(nargs="*", metavar="QUESTION")
    file: InFile | None = option(None, "questions, one a line")
    out: OutFile | None = option(None, OUT)
    nbest: int = option(1, "answers to each question", metavar="N", least=1)
    no_answer: bool = flag("'no answer' may win, as in SQuAD v2.0")
    jsonl: bool = flag("print a JSON object a question")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.inference.commands import answer_questions

        answer_questions(self)


@command("classify", "the label of each sentence or pair, by a fine-tuned classifier")
class Classify(OnText):
    r"""Classify sentences, or pairs parted by a tab, by a model that was fine-tuned on sentence_prediction.

        echo "A fine film." | relpos classify checkpoints/checkpoint_best.pt
        printf 'It rains.\tIt is wet.\n' | relpos classify checkpoints/checkpoint_best.pt
        relpos classify checkpoints/checkpoint_best.pt lines.txt --jsonl

    The tokenizer, dictionaries and labels are those of training, which lie in text/ beside the
    checkpoint. Prints the likeliest label and its probability, parted by a tab, for each line; of a
    converted model of several labels all that are likelier than not; for a regression its number;
    with --jsonl {"line", "source", "label", "probability", "probabilities"} or
    {"line", "source", "score"}. An empty line has an empty answer.
    """

    file: InFile | None = argument("an example a line (standard input)", nargs="?", metavar="FILE", default=None)
    out: OutFile | None = option(None, OUT)
    on_long_line: str = option("fail", "default: %(default)s", choices=("fail", "cut"))
    jsonl: bool = flag("print a JSON object a line")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.classification import classify_lines

        classify_lines(self)


@command("score", "score translations by BLEU and chrF, and compare two systems")
class Score:
    """Score translations: detokenised BLEU, cased and uncased, chrF, and TER, with sacrebleu's signatures.

        relpos score generated.txt --prepared data/wmt15.en-de
        relpos score generated.txt --baseline other.txt --prepared DIR
        relpos score system.de --reference test.de --target-lang de

    A system's file is fairseq-generate's output or plain lines; a sentence that is missing or repeated
    is an error, and so is the output of another test set. --prepared is the folder that
    `relpos prepare wmt` wrote: it knows the reference, the tokenizer and the units. BLEU cuts words as
    sacrebleu does for the target's language (zh, ja-mecab, ko-mecab, else 13a). --baseline compares two
    systems by a paired bootstrap. --comet runs `comet-score`, which may be installed in an environment of
    its own, if that is on PATH. The papers report uncased BLEU on newstest2015.
    """

    system: InFile = argument("fairseq-generate's output, or one translation a line")
    baseline: InFile | None = option(None, "a second system, to compare with")
    prepared: InFolder | None = option(None, "the folder of `relpos prepare wmt`", metavar="DIR")
    split: str = option("test", "of it: test, test1, valid, or the set's own name (default: test)")
    reference: list[InFile] | None = option(None, "plain references, where there is no --prepared", metavar="FILE")
    target_lang: str | None = option(None, "language, where there is no --prepared", metavar="LANG")
    tokenizer: str | None = option(None, "what the system's words were cut by", choices=("moses", "none"))
    units: str | None = option(None, choices=("auto", "subword-nmt", "sentencepiece", "none"))
    tokenize: str | None = option(None, "BLEU's tokenizer, by sacrebleu's name: char, flores200 (default: by language)")
    ter: bool = flag("TER as well")
    comet: str | None = option(
        None, "COMET as well, by this model: Unbabel/wmt22-comet-da, or a .ckpt", metavar="MODEL"
    )
    source: InFile | None = option(None, "what was translated, for COMET, where there is no --prepared", metavar="FILE")
    resamples: int = option(1000, "of the bootstrap (default: 1000)", least=1)
    seed: int = option(12345, "of the bootstrap (default: sacrebleu's, 12345)")
    out: OutFile | None = option(None, "write the numbers here as well, in JSON")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.translation import evaluate, read_prepared, read_reference

        if bool(self.prepared) == bool(self.reference):
            raise ValueError("give either --prepared DIR or --reference FILE")
        if self.prepared and self.source:
            raise ValueError("--source goes with --reference: --prepared has its own")
        if self.reference:
            target = read_reference(self.reference, self.target_lang, self.tokenizer, self.units, self.source)
        else:
            target = read_prepared(self.prepared, self.split, self.tokenizer, self.units)
        more = (self.tokenize, self.ter, self.comet)
        evaluate(self.system, target, self.baseline, self.resamples, self.seed, self.out, *more)
