"""What do positions cost in whole models, and what do other libraries charge for them?"""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.benchmark_models", run_name="__main__", alter_sys=True)
