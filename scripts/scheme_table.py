"""The contract table of all schemes, from the code: for the README, or for the terminal."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.scheme_table", run_name="__main__", alter_sys=True)
