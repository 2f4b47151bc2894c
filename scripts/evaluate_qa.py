"""Answers the questions of files of SQuAD's format by a checkpoint, or scores predictions."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.evaluate_qa", run_name="__main__", alter_sys=True)
