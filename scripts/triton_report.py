"""What do the Triton kernels need of a GPU?  Compiles them for it, whether there is one or not."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.triton_report", run_name="__main__", alter_sys=True)
