"""Convert a pretrained RoBERTa or BERT to another position scheme."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.convert_checkpoint", run_name="__main__", alter_sys=True)
