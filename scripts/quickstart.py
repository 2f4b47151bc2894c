"""From text to a trained, scored and drawn translation model with a chosen position scheme."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.quickstart", run_name="__main__", alter_sys=True)
