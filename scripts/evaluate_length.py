"""Perplexity of a language model by the length of its context and of its memory."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.evaluate_length", run_name="__main__", alter_sys=True)
