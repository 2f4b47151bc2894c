"""`relpos convert`, `relpos average` and `relpos export ...`: checkpoints to other checkpoints and formats."""

from collections.abc import Sequence
from dataclasses import make_dataclass

from relpos_fairseq.cli.command import command
from relpos_fairseq.core.options import declared_options
from relpos_fairseq.io.options import (
    InFile,
    InFolder,
    InPath,
    OutFile,
    OutFolder,
    OutPath,
    argument,
    flag,
    option,
    required,
)

# Options of the result beside its scheme, by the names of our models' config.
POSITIONS = (
    *((option.field, option.help, option.metavar) for option in declared_options() if not option.training_only),
    ("segment_encoding", "of sentence pairs", "none|input|head"),
    ("segment_share", "who has one table of segments in common", "none|heads|layers|both"),
    ("num_segments", "number of segments", "N"),
)
Positions = make_dataclass(
    "Positions",
    [
        (name, str | None, option(None, text, metavar=values, group="positions of the result (SRC's, or auto)"))
        for name, text, values in POSITIONS
    ],
    kw_only=True,
)


@command("convert", "convert a pretrained model to another position scheme")
class Convert(Positions):
    """Convert a pretrained RoBERTa or BERT to another position scheme.

        relpos convert SRC --to SCHEME --out DST

    SRC: a checkpoint of fairseq's RoBERTa (argparse's or a dataclass's options) or of relpos_roberta,
    or a Hugging Face folder of BERT, DistilBERT, RoBERTa, XLM-R, DeBERTa, Marian or `relpos export transformers`
    (config.json, safetensors or bin, in one file or several), or OpenNMT-py's checkpoint, or `model.pt`
    of Transformer-XL's released PyTorch code (attn_type 0 to 3; --data is the folder of its cache.pt).
    Models that generate are converted --to same.  SCHEME: a position scheme or hybrid, `same`, or
    `hf-bert`, `hf-roberta` for the way back.

    The conversion is exact where the algebra nests, or refused; --approximate converts all the same.
    Afterwards both models are run on random input, and the largest difference of their logits is
    printed.  DST is a new folder with model.pt, dict.txt and the tokenizer's files (or, ending in .pt,
    the checkpoint alone): --finetune-from-model DST/model.pt trains it.
    """

    source: InPath = argument("checkpoint or Hugging Face folder", metavar="SRC")
    to: str = required("position scheme, same, hf-bert, hf-roberta", metavar="SCHEME")
    out: OutPath = required("new folder, or new file ending .pt", metavar="DST")
    data: InFolder | None = option(None, "of SRC's dict.txt and tokenizer, or cache.pt", metavar="DIR")
    approximate: bool = flag(
        "convert what cannot be converted exactly; the result must be trained (cheaper, and exact: keep the "
        "old scheme beside the new one, as in --to OLD+NEW)"
    )
    init: str = option(
        "neutral",
        (
            "where new tables start: neutral (they change nothing, where that can be; default) or own (the "
            "scheme's initial values)"
        ),
        choices=("neutral", "own"),
    )
    positions: int | None = option(None, "positions of the result (those of SRC)", metavar="N", least=2)
    fill: str | None = option(None, "how absolute positions beyond SRC's are", choices=("tile", "interpolate"))
    head: str | None = option(None, "head that goes into a Hugging Face folder (masked LM)", metavar="NAME")
    seed: int = option(1, "of new tables and random input (%(default)s)")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.formats.convert import Job, convert_on_disk

        given = {name: getattr(self, name) for name, _, _ in POSITIONS} | {"max_positions": self.positions}
        job = Job(self.to, given, self.approximate, self.init, self.fill, self.head, self.seed)
        convert_on_disk(job, self.source, self.out, self.data)


@command("average", "average checkpoints of one training")
class Average:
    """Average the parameters of checkpoints of one training, as Vaswani et al. 2017 do (section 6.1).

        relpos average checkpoints/wmt --last 5 --out avg.pt
        relpos average checkpoints/wmt --last-updates 5 --out avg.pt
        relpos average one.pt two.pt --out avg.pt
        relpos average checkpoint_best.pt --ema --out ema.pt  # of --store-ema

    Checkpoints are loaded safely (weights_only). All must be of the same position scheme, which the
    result keeps, and have the same tensors. Sums are made in double precision. The optimizer's state is
    left out: the result is for translating and for starting anew, not for resuming.
    """

    checkpoints: list[InPath] = argument("or their one folder", metavar="CHECKPOINT")
    last: int | None = option(None, "of a folder: the last N epochs' checkpoints", metavar="N")
    last_updates: int | None = option(None, "of a folder: the last N by updates", metavar="N")
    ema: bool = flag("the moving averages that training with --store-ema keeps in a checkpoint")
    out: OutFile = required()

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.evaluation.averaging import choose, write_average

        paths = choose(self.checkpoints, self.last, self.last_updates)
        write_average(paths, self.out, self.ema)
        print(f"averaged {len(paths)} checkpoints into {self.out}:")
        print("\n".join(f"  {path}" for path in paths), flush=True)


@command("export ct2", "a translation checkpoint for CTranslate2, compared with the original")
class ExportCt2:
    """Export a translation checkpoint to CTranslate2, an engine that serves it fast on CPUs and GPUs.

        relpos export ct2 checkpoints/checkpoint_best.pt --out served [--quantization int8]

    served is a new folder that `ctranslate2.Translator("served")` opens. Before it is there,
    its logits and its translations of the validation set are compared with the checkpoint's, and what
    differs is not written. A position scheme that the engine cannot hold is refused by name: relpos
    export onnx holds every scheme. Needs pip install 'relpos_fairseq[ct2]'.
    """

    checkpoint: InFile = argument("checkpoint of a relpos_transformer")
    out: OutFolder = required("new folder")
    quantization: str | None = option(
        None,
        "smaller weights: int8, int8_float32, int8_float16, int8_bfloat16, int16, float16 (default: fp32)",
        metavar="TYPE",
        choices=("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16"),
    )
    data: InFolder | None = option(None, "its data (the folder it was trained on; else text/ beside it)", metavar="DIR")
    sentences: int = option(1000, "how many to compare (%(default)s)", least=1)

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.export.ct2 import export

        export(self.checkpoint, self.out, self.quantization, self.data, self.sentences)
        print(f"wrote {self.out}")


@command("export onnx", "any checkpoint as ONNX graphs, compared with the original")
class ExportOnnx:
    """Export any checkpoint as ONNX graphs: any scheme, batches and inputs of any size.

        relpos export onnx checkpoints/checkpoint_best.pt --out graphs [--quantization int8]

    graphs is a new folder: encoder.onnx and step.onnx (one step of decoding) of a translation model,
    step.onnx of a language model, segment.onnx of one with memory, model.onnx of a RoBERTa with all its
    heads; relpos.json names inputs, outputs and their sizes. Before the folder is there, onnxruntime
    runs the graphs at sizes that were not traced, and what differs from the checkpoint is not written.
    Needs pip install 'relpos_fairseq[onnx]'.
    """

    checkpoint: InFile = argument("checkpoint of a relpos model")
    out: OutFolder = required("new folder")
    data: InFolder | None = option(None, "its dictionaries, if they matter", metavar="DIR")
    quantization: str | None = option(None, "weights in int8 (default: fp32)", choices=("int8",))

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.export.onnx import export

        export(self.checkpoint, self.out, self.data, self.quantization)
        print(f"wrote {self.out}")


@command("export transformers", "a model of any scheme for transformers' Auto classes")
class ExportTransformers:
    """Export a model of any position scheme as a folder of Hugging Face's transformers.

        relpos export transformers checkpoints/checkpoint_best.pt --out folder

    AutoTokenizer, AutoModel, AutoModelForMaskedLM, ...SequenceClassification and ...QuestionAnswering
    load a RoBERTa, AutoModelForSeq2SeqLM a translation model and AutoModelForCausalLM a language model
    (both have generate()), with trust_remote_code=True; this package must be installed. A fine-tuned
    head goes along. Outputs and token ids are compared before the folder is there. The way back, for
    RoBERTa, is relpos convert FOLDER --to same --out DST.
    Needs pip install 'relpos_fairseq[transformers]'.
    """

    checkpoint: InFile = argument("checkpoint of a RoBERTa, translation or language model")
    out: OutFolder = required("new folder")
    data: InFolder | None = option(None, "folder of its data (what lies beside it)")
    head: str | None = option(None, "which head goes along, of several")

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.io.packages import require

        for package in ("transformers", "safetensors"):
            require(package)
        from relpos_fairseq.export.transformers_folder import export_generating, export_roberta, generates

        if generates(self.checkpoint):
            if self.head:
                raise ValueError(f"--head {self.head}: only a RoBERTa has heads: leave it out")
            done = export_generating(self.checkpoint, self.out, self.data)
        else:
            done = export_roberta(self.checkpoint, self.out, self.data, self.head)
        print(f"wrote {self.out}: {done}")
