"""Prepares a WMT translation pair, or parallel text of your own, for fairseq: one command."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.prepare_wmt", run_name="__main__", alter_sys=True)
