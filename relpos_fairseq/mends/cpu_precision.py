"""`--bf16` makes fairseq believe that it runs on a TPU, and it dies without torch_xla."""

import argparse


def keep_bf16_off_tpu(args: argparse.Namespace) -> None:
    """Take that back: fairseq calls this as a function of the architecture, which comes later."""
    if getattr(args, "bf16", False):
        args.tpu = False
