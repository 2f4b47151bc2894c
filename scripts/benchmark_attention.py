"""How much slower is attention with positions than attention without?"""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.benchmark_attention", run_name="__main__", alter_sys=True)
