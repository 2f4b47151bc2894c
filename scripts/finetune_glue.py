"""Fine-tunes pre-trained models on GLUE by a published protocol and prints one table."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.finetune_glue", run_name="__main__", alter_sys=True)
