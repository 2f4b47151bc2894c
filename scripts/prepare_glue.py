"""Makes data-bins for fairseq's sentence_prediction from GLUE's files, and from XNLI's."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.prepare_glue", run_name="__main__", alter_sys=True)
