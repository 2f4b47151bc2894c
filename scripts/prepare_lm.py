"""Turns plain text, or WikiText and enwik8, into data that language models train on."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.prepare_lm", run_name="__main__", alter_sys=True)
