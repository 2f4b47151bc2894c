"""The papers' tables of costs, measured here: BERT with every position scheme."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.cost_table", run_name="__main__", alter_sys=True)
