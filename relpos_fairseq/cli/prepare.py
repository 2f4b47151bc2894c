"""`relpos prepare ...` and `relpos corpus`: raw text to the folders that fairseq trains on."""

import os
from collections.abc import Sequence

from relpos_fairseq.cli.command import command
from relpos_fairseq.data.squad import BAD_ANSWER
from relpos_fairseq.io.command import CONTINUE
from relpos_fairseq.io.options import InFile, InFolder, OutFile, OutFolder, WorkFolder, argument, flag, option, required
from relpos_fairseq.preparation.corpora import CORPORA
from relpos_fairseq.preparation.settings import DOCUMENTS, HOLD_OUT, LEAST_TOKENS, LEVELS, PACKING
from relpos_fairseq.preparation.settings import check_glue as check_glue
from relpos_fairseq.preparation.settings import check_mlm as check_mlm
from relpos_fairseq.preparation.wmt_settings import MODEL_TYPES, WmtOptions, WmtSettings
from relpos_fairseq.text import KINDS

TEXT = "text (plain, .gz, .bz2 or .xz)"


@command("prepare wmt", "a WMT pair or your own parallel text, for translation", interrupted=CONTINUE)
class PrepareWmt(WmtOptions):
    """Prepare a WMT translation pair, or parallel text of your own, for fairseq: one command.

        relpos prepare wmt wmt15 en-de --out data/wmt15.en-de --workers 8
        relpos prepare wmt wmt18 en-cs --out data/wmt18.en-cs --czeng ~/czeng16
        relpos prepare wmt en-de --from-dir my_text --out data/mine --vocab-size 8000

    Downloads (or takes from --from-dir), extracts, normalises, filters, tokenises, learns and applies
    subword units and writes fairseq's binary files. Interrupted at any moment, the same command continues;
    run again, it does nothing; what changed is made anew. OUT/data-bin is what fairseq reads,
    OUT/manifest.json says what was made of what.
    """

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.preparation.wmt import WmtPreparation

        preparation = WmtPreparation(WmtSettings(self))
        preparation.announce()
        if not self.dry_run:
            preparation.check_pair()
            preparation.require_space()
            preparation.agree(self.yes)
            preparation.run(["relpos prepare wmt", *argv], self.force)


@command("prepare lm", "plain text, WikiText or enwik8, for language models", interrupted=CONTINUE)
class PrepareLm:
    """Turn plain text, or WikiText and enwik8, into data that language models train on.

        relpos prepare lm --corpus wikitext-103 --out data-bin/wikitext-103
        relpos prepare lm --corpus enwik8 --out data-bin/enwik8
        relpos prepare lm --text book.txt.gz --shares 0.9,0.05,0.05 --level char --out D
        relpos prepare lm --train a.txt b.txt --valid v.txt --level sentencepiece --out D

    The result is fairseq's: dict.txt, train.bin, train.idx, ... At the levels of words and of
    sentencepiece's pieces `</s>` ends every line; at those of characters and bytes `</s>` is the line
    feed itself, so that tokens are exactly the text's characters or bytes and bits per token are bits
    per character. With --documents, train.documents.npy has the offsets (int64) of the tokens that
    documents start with. With --shards N, train is divided over shard0 ... and the printed
    `shard0:shard1:...` is what fairseq takes as its data. manifest.json has the counts that
    perplexities are divided by, and the hashes of everything.
    """

    train: list[InFile] = option([], metavar="FILE", group=TEXT)
    valid: list[InFile] = option([], metavar="FILE", group=TEXT)
    test: list[InFile] = option([], metavar="FILE", group=TEXT)
    text: list[InFile] = option([], "to be split", metavar="FILE", group=TEXT)
    shares: str | None = option(
        None, "of train, valid, test in --text", metavar="A,B[,C]", group=TEXT, was=("--split",)
    )
    corpus: str | None = option(None, choices=sorted(CORPORA), group=TEXT)
    downloads: WorkFolder | None = option(None, "default: OUT/downloads", metavar="DIR", group=TEXT)
    from_dir: InFolder | None = option(None, "has the corpus's archive", metavar="DIR", group=TEXT)
    yes: bool = flag("download it without asking", group=TEXT)
    on_bad_line: str = option("fail", choices=("fail", "drop"), group=TEXT)
    level: str | None = option(None, "default: the corpus's own, else word", choices=LEVELS, group="units")
    dict: InFile | None = option(None, "use this dict.txt", metavar="FILE", group="units")
    threshold: int = option(0, "units that occur fewer than N times are unknown", metavar="N", group="units", least=0)
    words: int | None = option(None, "keep the N most frequent units", metavar="N", group="units", least=1)
    padding_factor: int = option(1, metavar="N", group="units", least=1)
    sentencepiece: InFile | None = option(None, "use this model", metavar="FILE", group="units")
    vocab_size: int = option(16000, metavar="N", group="units", least=1)
    model_type: str = option("unigram", choices=MODEL_TYPES, group="units")
    character_coverage: float = option(1.0, metavar="P", group="units", above=0, most=1)
    byte_fallback: bool = flag("no character is unknown", group="units")
    learn_lines: int = option(
        1_000_000, "lines that sentencepiece learns from", metavar="N", group="units", was=("--sample-lines",), least=1
    )
    seed: int = option(1, "chooses those lines", group="units")
    out: OutFolder = required(metavar="DIR", group="result")
    documents: str = option(
        "none", "what starts a document: a line after blank ones, a WikiText title", choices=DOCUMENTS, group="result"
    )
    shards: int = option(1, metavar="N", group="result", least=1)
    workers: int = option(2, metavar="N", group="result", least=1)
    force: bool = flag("make everything again", group="result")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.preparation.lm import LmPreparation

        LmPreparation(self).run(["relpos prepare lm", *argv], self.force)


@command("prepare mlm", "plain text in one or many languages, for masked language models", interrupted=CONTINUE)
class PrepareMlm:
    r"""Prepare plain text for masked language models: tokenizer, blocks, shards.

        relpos prepare mlm --out data/wiki --train en=wiki.en.txt.gz de=wiki.de.txt.gz \
            --train-tokenizer sentencepiece --vocab-size 120000 --alpha 0.7 --tokens-per-sample 512

    The result is a data-bin for fairseq's masked_lm. The same command again continues after an
    interruption, and does only what has changed.
    """

    out: OutFolder = required("folder to write to")
    train: list[str] = required("text, or .gz .bz2 .xz", metavar="[LANG=]FILE")
    valid: list[str] = option([], "validation text", metavar="[LANG=]FILE")
    hold_out: float | None = option(
        None, f"without --valid: this share of the documents (default: {HOLD_OUT})", metavar="F"
    )
    documents: str = option(
        "blank",
        (
            "what ends a document: an empty line, each line, the file; json: each line is an object with a text, "
            "as in C4; or what the line that begins one looks like (default: %(default)s)"
        ),
        metavar="blank|line|file|json|REGEX",
    )
    sentences: str = option(
        "line", "a line is a sentence, or is split into some (default: %(default)s)", choices=("line", "split")
    )
    on_bad_line: str = option("fail", "lines that are not UTF-8", choices=("fail", "drop"))
    train_tokenizer: str | None = option(None, "train one (default: bpe)", choices=KINDS, was=("--tokenizer",))
    tokenizer_folder: InFolder | None = option(None, "use this one instead, with its dict.txt")
    vocab_size: int | None = option(None, "symbols (default: 50000)", least=5)
    lowercase: bool = flag("wordpiece: BERT's uncased normalisation")
    character_coverage: float | None = option(None, "sentencepiece's (default: 0.9995)")
    learn_lines: int | None = option(
        None,
        "train it on about so many sentences (default: 10000000)",
        metavar="N",
        was=("--tokenizer-sentences",),
        least=1,
    )
    alpha: float = option(
        0.7, "exponent of the languages' shares; 1 keeps them (default: %(default)s)", least=0, most=1
    )
    pack: str = option(
        "document", "blocks of full sentences of one document, of several, or no blocks", choices=PACKING
    )
    tokens_per_sample: int = option(
        512, "tokens of a block with <s> (default: %(default)s)", metavar="N", least=LEAST_TOKENS
    )
    shards: int = option(1, "data-bins, one an epoch (default: %(default)s)", least=1)
    workers: int = option(os.cpu_count() or 1, "processes (default: %(default)s)", least=1)
    seed: int = option(1, "of hold-out and sampling (default: %(default)s)", least=0)
    force: bool = flag("repeat stages that are done")

    def run(self, argv: Sequence[str]) -> None:
        check_mlm(self)

        from relpos_fairseq.preparation.mlm import MlmPreparation

        MlmPreparation(self).run(["relpos prepare mlm", *argv], self.force)


@command("prepare glue", "GLUE's and XNLI's files, for fine-tuning", interrupted=CONTINUE)
class PrepareGlue:
    r"""Make data-bins for fairseq's sentence_prediction from GLUE's files, and from XNLI's.

        relpos prepare glue glue_data --tokenizer-folder data/wiki/data-bin --out data-bin/glue \
            --tasks CoLA,MRPC,RTE,STS-B --max-length 128

    `glue_data` has a folder for every task, in GLUE's own layout (`RTE/train.tsv`, `RTE/dev.tsv`; .gz,
    .bz2 and .xz will do); XNLI also in its release's or XTREME's. Tasks that are done are kept.
    """

    glue: InFolder = argument("folder with a folder for every task")
    tokenizer_folder: InFolder | None = option(
        None, "the model's, with its dict.txt, as relpos prepare mlm writes it", was=("--tokenizer",)
    )
    out: OutFolder | None = option(None, "folder to write to")
    text: OutFile | None = option(
        None,
        (
            "instead: write the training sentences as text for relpos prepare mlm, an example a document, a sentence "
            "a line"
        ),
        metavar="FILE",
    )
    tasks: str | None = option(None, "separated by commas (default: those of GLUE that are there)")
    max_length: int = option(
        512,
        (
            "tokens of an example, special ones included; longer ones lose the end of their longer sentence, as "
            "in BERT; 0: no limit (default: %(default)s)"
        ),
        metavar="N",
    )
    on_bad_row: str = option(
        "fail", "rows with columns or labels missing (default: %(default)s)", choices=("fail", "drop")
    )
    workers: int = option(os.cpu_count() or 1, "processes (default: %(default)s)", least=1)
    force: bool = flag("repeat tasks that are done")

    def run(self, argv: Sequence[str]) -> None:
        check_glue(self)

        from relpos_fairseq.preparation import glue

        if self.text:
            glue.write_sentences(glue.tasks_of(self), self.glue, self.text, self.on_bad_row)
        else:
            glue.GluePreparation(self).run(["relpos prepare glue", *argv], self.force)


@command("prepare qa", "files of SQuAD's format, for question answering", interrupted=CONTINUE)
class PrepareQa:
    r"""Turn files of SQuAD's format into the folder that --task question_answering reads.

        relpos prepare qa --train train-v1.1.json --valid dev-v1.1.json \
            --train-tokenizer wordpiece --vocab-size 30000 --out data-bin/squad
        relpos prepare qa --train xquad.en.json --train-articles 36 \
            --eval xquad.de.json xquad.zh.json --tokenizer-folder TOKENIZER --out data-bin/xquad

    The folder holds train.json, valid.json, one .json for every file of --eval under its own name, the
    tokenizer, dict.txt, and manifest.json with counts and hashes. A tokenizer comes from a folder
    (--tokenizer-folder: ours, a Hugging Face model's with its dict.txt, or fairseq's GPT-2 files) or is
    trained on the contexts (--train-tokenizer). With --train-articles N the first N articles of --train
    are train.json and the others valid.json; the files of --eval, where they are translations of it as
    XQuAD's are, are cut in the same way (--eval-articles all takes them whole). Every file is read and
    checked; what is wrong is named with its file and id.
    """

    train: list[InFile] = required("training files")
    valid: list[InFile] = option([], "validation files")
    eval: list[InFile] = option([], "files to evaluate on")
    out: OutFolder = required("folder to make")
    train_articles: int | None = option(None, "train on the first N articles, validate on the others", least=1)
    eval_articles: str = option(
        "same", "with --train-articles: cut --eval files in the same way, or take them whole", choices=("same", "all")
    )
    tokenizer_folder: InFolder | None = option(None, "folder of a tokenizer", was=("--tokenizer",))
    train_tokenizer: str | None = option(None, "train one on all contexts", choices=KINDS)
    vocab_size: int | None = option(None, "its size (default 8000)")
    lowercase: bool = flag("wordpiece: uncased")
    on_bad_answer: str = option(
        "drop", "answers that are not at their offset: fail here, or leave them to the task", choices=BAD_ANSWER
    )

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.preparation.qa import QaPreparation, check_qa

        check_qa(self)
        QaPreparation(self).run(["relpos prepare qa", *argv])


@command("corpus", "write the built-in corpus of the quickstart")
class Corpus:
    """Write the built-in English-German corpus: tokenised text, one sentence a line.

    relpos corpus --out corpus --train 24000
    """

    out: OutFolder = required("directory to write to")
    seed: int = option(1, "seed (default: %(default)s)", least=0)
    train: int = option(24000, "training pairs (default: %(default)s)", least=1)
    valid: int = option(500, "validation pairs (default: %(default)s)", least=1)
    test: int = option(500, "test pairs (default: %(default)s)", least=1)
    test_long: int = option(300, "long test pairs (default: %(default)s)", least=1)

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.data.corpus import build, describe, write

        corpus = build(self.seed, self.train, self.valid, self.test, self.test_long)
        write(corpus, self.out)
        print(describe(corpus))
