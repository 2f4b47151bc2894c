"""Draw what a checkpoint's positions have learned, and how it attends."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.plot_positions", run_name="__main__", alter_sys=True)
