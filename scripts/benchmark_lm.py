"""Speed and perplexity of evaluating a language model with memory and without, at equal context."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.benchmark_lm", run_name="__main__", alter_sys=True)
