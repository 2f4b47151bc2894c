"""Score translations: BLEU, cased and uncased, and chrF, with their signatures of sacrebleu."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.score_translation", run_name="__main__", alter_sys=True)
