"""Turns files of SQuAD's format into the folder that --task question_answering reads."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.prepare_qa", run_name="__main__", alter_sys=True)
