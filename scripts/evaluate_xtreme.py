"""Evaluates models that were fine-tuned on English in every language that is there (XTREME)."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.evaluate_xtreme", run_name="__main__", alter_sys=True)
