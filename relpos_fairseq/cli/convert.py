"""Convert a pretrained RoBERTa or BERT to another position scheme.

    relpos convert SRC --to SCHEME --out DST

SRC: a checkpoint of fairseq's RoBERTa (argparse's or a dataclass's options) or of relpos_roberta,
or a Hugging Face folder of BERT, RoBERTa, XLM-R, DeBERTa, Marian or `relpos export transformers`
(config.json, safetensors or bin, in one file or several), or OpenNMT-py's checkpoint, or `model.pt`
of Transformer-XL's released PyTorch code (attn_type 0 to 3; --data is the folder of its cache.pt).
Models that generate are converted --to same.  SCHEME: a position scheme or hybrid, `same`, or
`hf-bert`, `hf-roberta` for the way back.

The conversion is exact where the algebra nests, or refused; --approximate converts all the same.
Afterwards both models are run on random input, and the largest difference of their logits is
printed.  DST is a new folder with model.pt, dict.txt and the tokenizer's files (or, ending in .pt,
the checkpoint alone): --finetune-from-model DST/model.pt trains it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "convert a pretrained model to another position scheme"
# Options of the result beside its scheme, by the names of our models' config.
POSITIONS = (
    "position_clip_distance",
    "position_share",
    "position_random_range",
    "position_random_at",
    "position_scale",
    "position_reset_cls",
    "position_rank",
    "position_buckets",
    "position_max_distance",
    "position_scalar_gain",
    "position_query_bias",
    "position_p2c_index",
    "position_projections",
    "position_scalars",
    "position_keys",
    "position_log_buckets",
    "position_terms",
    "position_norm",
    "clamp_len",
    "position_rope_scaling",
    "position_rope_factor",
    "position_rope_length",
    "position_rope_log_n",
    "position_rope_base",
    "position_rope_share",
    "position_rope_pairs",
    "position_fire_threshold",
    "position_xpos_base",
    "position_contexts",
    "segment_encoding",
    "segment_share",
    "num_segments",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="checkpoint or Hugging Face folder")
    add("--to", required=True, metavar="SCHEME", help="position scheme, same, hf-bert, hf-roberta")
    add("--out", type=Path, required=True, metavar="DST", help="new folder, or new file ending .pt")
    add("--data", type=Path, metavar="DIR", help="of SRC's dict.txt and tokenizer, or cache.pt")
    add(
        "--approximate",
        action="store_true",
        help="convert what cannot be converted exactly; the result must be trained (cheaper, and "
        "exact: keep the old scheme beside the new one, as in --to OLD+NEW)",
    )
    add(
        "--init",
        choices=("neutral", "own"),
        default="neutral",
        help="where new tables start: neutral (they change nothing, where that can be; default) "
        "or own (the scheme's initial values)",
    )
    add("--positions", type=int, metavar="N", help="positions of the result (those of SRC)")
    add("--fill", choices=("tile", "interpolate"), help="how absolute positions beyond SRC's are")
    add("--head", metavar="NAME", help="head that goes into a Hugging Face folder (masked LM)")
    add("--seed", type=int, default=1, help="of new tables and random input (%(default)s)")
    group = parser.add_argument_group("positions of the result (SRC's, or auto)")
    for name in POSITIONS:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.conversion.job import Job
    from relpos_fairseq.conversion.on_disk import convert_on_disk

    if args.positions is not None and args.positions < 2:
        raise ValueError(f"--positions must be >= 2, got {args.positions}")
    given = {name: getattr(args, name) for name in POSITIONS}
    job = Job(
        to=args.to,
        given=given | {"max_positions": args.positions},
        approximate=args.approximate,
        init=args.init,
        fill=args.fill,
        head=args.head,
        seed=args.seed,
    )
    convert_on_disk(job, args.source, args.out, args.data)
