"""Makes a data-bin for fairseq's masked_lm from plain text: tokenizer, blocks, shards."""

from runpy import run_module

if __name__ == "__main__":
    run_module("relpos_fairseq.cli.prepare_mlm", run_name="__main__", alter_sys=True)
