"""Measure text preparation: pairs a second by workers, peak memory by size."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.benchmark_preparation", run_name="__main__", alter_sys=True)
