"""Writes the built-in English-German corpus: tokenised text, one sentence a line."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.make_corpus", run_name="__main__", alter_sys=True)
