"""Average the parameters of checkpoints of one training (Vaswani et al. 2017, section 6.1)."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.average_checkpoints", run_name="__main__", alter_sys=True)
