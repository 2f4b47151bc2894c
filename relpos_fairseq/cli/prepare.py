"""`relpos prepare ...` and `relpos corpus`: raw text to the folders that fairseq trains on."""

from collections.abc import Sequence

from relpos_fairseq.cli.command import command
from relpos_fairseq.io.command import CONTINUE
from relpos_fairseq.io.options import OutFolder, option, required
from relpos_fairseq.preparation.settings import GlueOptions, LmOptions, MlmOptions, QaOptions, check_glue, check_mlm
from relpos_fairseq.preparation.wmt_settings import WmtOptions, WmtSettings


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
class PrepareLm(LmOptions):
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

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.preparation.lm import LmPreparation

        LmPreparation(self).run(["relpos prepare lm", *argv], self.force)


@command("prepare mlm", "plain text in one or many languages, for masked language models", interrupted=CONTINUE)
class PrepareMlm(MlmOptions):
    r"""Prepare plain text for masked language models: tokenizer, blocks, shards.

        relpos prepare mlm --out data/wiki --train en=wiki.en.txt.gz de=wiki.de.txt.gz \
            --train-tokenizer sentencepiece --vocab-size 120000 --alpha 0.7 --tokens-per-sample 512

    The result is a data-bin for fairseq's masked_lm. The same command again continues after an
    interruption, and does only what has changed.
    """

    def run(self, argv: Sequence[str]) -> None:
        settings = check_mlm(self)

        from relpos_fairseq.preparation.mlm import MlmPreparation

        MlmPreparation(settings).run(["relpos prepare mlm", *argv], self.force)


@command("prepare glue", "GLUE's and XNLI's files, for fine-tuning", interrupted=CONTINUE)
class PrepareGlue(GlueOptions):
    r"""Make data-bins for fairseq's sentence_prediction from GLUE's files, and from XNLI's.

        relpos prepare glue glue_data --tokenizer-folder data/wiki/data-bin --out data-bin/glue \
            --tasks CoLA,MRPC,RTE,STS-B --max-length 128

    `glue_data` has a folder for every task, in GLUE's own layout (`RTE/train.tsv`, `RTE/dev.tsv`; .gz,
    .bz2 and .xz will do); XNLI also in its release's or XTREME's. Tasks that are done are kept.
    """

    def run(self, argv: Sequence[str]) -> None:
        check_glue(self)

        from relpos_fairseq.preparation import glue

        if self.text:
            glue.write_sentences(glue.tasks_of(self), self.glue, self.text, self.on_bad_row)
        else:
            glue.GluePreparation(self).run(["relpos prepare glue", *argv], self.force)


@command("prepare qa", "files of SQuAD's format, for question answering", interrupted=CONTINUE)
class PrepareQa(QaOptions):
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
        from relpos_fairseq.lab.toy.corpus import build, describe, write

        corpus = build(self.seed, self.train, self.valid, self.test, self.test_long)
        write(corpus, self.out)
        print(describe(corpus))
