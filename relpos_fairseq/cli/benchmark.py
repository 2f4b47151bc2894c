"""`relpos benchmark ...`: what positions cost on this machine."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from relpos_fairseq.cli.command import command
from relpos_fairseq.io.options import InFile, InFolder, OutFile, WorkFile, argument, flag, option, required

INTERRUPTED = "interrupted; rows are kept by --csv FILE: add --resume to continue, or they are lost"
BACKENDS = "auto, reference, sdpa, blocked, native, triton"
A_ROW_EACH = f"a row each: of {BACKENDS}"
SIZES = ("multi30k", "base", "tiny", "iwslt_de_en", "wmt_en_de", "wmt_en_de_big")
WHAT, BESIDE, HOW, WRITTEN = "what is measured", "beside it", "how", "what is written"


@dataclass(kw_only=True)
class Timing:
    """Where candidates are timed, how long, and where their rows go."""

    device: str = option("cpu", choices=("cpu", "cuda"), group=HOW)
    dtype: str = option("float32", choices=("float32", "bfloat16", "float16"), group=HOW)
    threads: int | None = option(None, "of torch; default: its own choice", group=HOW, least=1)
    csv: WorkFile | None = option(None, "all rows, as they come", group=WRITTEN)
    resume: bool = flag("measure what --csv does not have yet", group=WRITTEN)
    write: WorkFile | None = option(None, "put the tables into this markdown file", group=WRITTEN)


@command("benchmark attention", "cost of attention with positions, beside attention without", INTERRUPTED)
class BenchmarkAttention(Timing):
    """How much slower is attention with positions than attention without?

        relpos benchmark attention                              # some minutes on a CPU
        relpos benchmark attention --lengths 512,2048 --batch-size 4 --naive
        relpos benchmark attention --device cuda --dtype bfloat16 --lengths all
        relpos benchmark attention --layer                      # a whole BERT layer
        relpos benchmark attention --isa avx2                   # as on a processor without AVX-512

    First every candidate is compared with the papers' formula in fp64, values and gradients.  Then all
    candidates are timed in one process, in turns, each only once the machine is idle otherwise.  The
    tables have ratios of medians to torch's scaled_dot_product_attention without positions (in
    brackets: of minima), and the spread.  Needs torch and relpos_fairseq's positions, schemes and
    attention: no fairseq, save to decode.  --plot needs matplotlib, and progress is shown where tqdm is
    installed.
    """

    isa: str | None = option(
        None,
        "instruction set of the C kernel and of torch; default: as the environment says",
        choices=("native", "avx2", "sse2"),
        group=WHAT,
    )
    schemes: str = option("all", "names separated by commas, or all", group=WHAT)
    lengths: str = option("128,512,2048", "T = S, by commas, or all", group=WHAT)
    max_tokens: int | None = option(None, "batch = tokens / length; 2048, on a GPU 16384", group=WHAT, least=1)
    batch_size: int | None = option(None, "this batch at every length, whatever --max-tokens is", group=WHAT, least=1)
    heads: int = option(12, group=WHAT, least=1)
    head_dim: int = option(64, group=WHAT, least=1)
    position_clip_distance: int = option(16, "0: as --unclipped", group=WHAT, metavar="K", least=0)
    unclipped: bool = flag("tables as long as the input", group=WHAT)
    causal: bool = flag(group=WHAT)
    modes: str = option("train,forward", "of train, forward, decode, memory", group=WHAT)
    layer: bool = flag("a whole BERT layer", group=WHAT)
    naive: bool = flag("the papers' formula too", group=BESIDE)
    backends: str = option("auto", "a row each: of auto, sdpa, blocked, native, triton", group=BESIDE)
    flex: bool = flag("FlexAttention too; compiles long", group=BESIDE)
    rounds: int = option(7, "samples of each (%(default)s)", group=HOW, least=1)
    seconds: float = option(20.0, "of a column (%(default)s)", group=HOW)
    plot: OutFile | None = option(None, "ratios over length: FILE.png, .svg or .pdf")

    def run(self, argv: Sequence[str]) -> int | None:
        logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
        from relpos_fairseq.lab.benchmarks.workload import run_under_instruction_set

        status = run_under_instruction_set(self.isa, "benchmark attention", argv)
        if status is not None:
            return status
        from relpos_fairseq.lab.benchmarks.attention import benchmark

        benchmark(self)
        return 0


@command("benchmark models", "cost of positions in whole models and layers, beside fairseq's own", INTERRUPTED)
class BenchmarkModels(Timing):
    """What do positions cost in whole models, and what do other libraries charge for them?

        relpos benchmark models                       # both parts, minutes on a CPU
        relpos benchmark models --parts translation --size base --schemes shaw,m4
        relpos benchmark models --parts layers --device cuda --dtype bfloat16

    translation: a step of training (forward, label-smoothed cross entropy, backward, Adam) and beam
    search of `relpos_transformer` with every scheme, relative to fairseq's own `transformer` of the
    same sizes.  Optimizer and loss are fairseq's own on both sides; further rows say what relpos_adam
    and relpos_label_smoothed_cross_entropy gain on fairseq's model, each by itself and both.
    layers: BERT's layer, training, forward pass and peak memory, relative to our layer without
    positions: every scheme, fairseq's own layer, and layers of equal sizes of other libraries where
    installed.

    All candidates of a column are timed in one process, in turns, each only once the machine is idle
    otherwise.  Medians, minima and spreads are printed.
    """

    parts: str = option("translation,layers", "of translation, layers")
    modes: str = option("train,generate,forward,memory", "of train, generate, forward, memory")
    schemes: str = option("all", "names separated by commas, or all")
    backends: str = option("auto", A_ROW_EACH)
    dropout: float = option(0.0)
    size: str = option("multi30k", f"one of {', '.join(SIZES)}", choices=SIZES, metavar="SIZE", group="translation")
    vocab_size: int = option(8000, group="translation", least=1)
    batch_size: int = option(32, "sentences of a batch", group="translation", least=1)
    length: int = option(24, "tokens of the longest sentence", group="translation", least=2)
    beam: int = option(5, group="translation", least=1)
    lengths: str = option("128,512", "separated by commas", group="layers")
    max_tokens: int = option(1024, "batch = tokens / length, >= 1", group="layers", least=1)
    width: int = option(768, group="layers", least=1)
    ffn: int = option(3072, group="layers", least=1)
    heads: int = option(12, group="layers", least=1)
    position_clip_distance: int = option(16, "0: unclipped", group="layers", metavar="K", least=0)
    peers: str = option("all", "of fairseq, transformers, flashdeberta, x-transformers; all, or none", group="layers")
    rounds: int = option(5, "samples of each (%(default)s)", group=HOW, least=1)
    seconds: float = option(60.0, "of a column (%(default)s)", group=HOW)
    plot: OutFile | None = option(None, "draw all ratios: FILE.png, .svg or .pdf")

    def run(self, argv: Sequence[str]) -> None:
        logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
        from relpos_fairseq.lab.benchmarks.models import benchmark

        benchmark(self)


@command("benchmark lm", "speed and perplexity of a language model with memory and without")
class BenchmarkLm:
    """Speed and perplexity of evaluating a language model with memory and without, at equal context.

        relpos benchmark lm XL_CHECKPOINT --data DATA_BIN [--baseline LM_CHECKPOINT]
            [--context 256] [--tokens 4000] [--sliding-tokens 200] [--train-updates 20]

    Every method scores the end of one split with --context tokens of context:
    - memory: segments of the trained length T (a whole row where rows are shorter), memory of
      context - T; a prediction sees context - T + 1 to context tokens at its first layer, and
      recurrence reaches further, layer by layer;
    - sliding window: no memory, the window moves by one token and gives one prediction: every
      prediction sees all of the context. This is what the paper compares with. It is slow, so it scores
      the last --sliding-tokens only, and memory is scored on those as well;
    - strided window: no memory, the window moves by T and gives T predictions; as memory, a prediction
      sees context - T + 1 to context tokens.
    --baseline adds both windows with a model that was trained without memory, and the speed of
    training the two, which means something where their parameters are equal.
    """

    checkpoint: InFile = argument("of relpos_transformer_xl")
    data: InFolder = required("folder of binarised text")
    baseline: InFile | None = option(None, "checkpoint of relpos_transformer_lm")
    split: str = option("valid")
    context: int | None = option(None, "tokens; default: trained segment + memory", least=1)
    tokens: int = option(4000, "predictions scored", least=1)
    sliding_tokens: int = option(200, "of them by sliding", least=1)
    batch_size: int = option(1, "rows or windows at a time", least=1)
    train_updates: int = option(20, "0: training is not timed")
    train_batch_size: int = option(16, least=1)
    threads: int | None = option(None, "of torch; default: its own choice", least=1)
    out: OutFile | None = option(None, "JSON of the numbers")

    def run(self, argv: Sequence[str]) -> None:
        logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
        from relpos_fairseq.lab.benchmarks.language_models import benchmark

        benchmark(self)


@command("benchmark costs", "what every position scheme adds to BERT: parameters, time, memory", INTERRUPTED)
class BenchmarkCosts(Timing):
    """What every position scheme adds to BERT: parameters, time, memory.

        relpos benchmark costs                               # BERT-base, minutes on a CPU
        relpos benchmark costs --size small --layers 0      # BERT-small, all of its layers
        relpos benchmark costs --layers 0 --vocab-size 30522 --batch-size 16 --device cuda

    Parameters are counted from the real model, whole, with BERT's 30,522 words and tables for 512
    positions.  Time and memory are those of a model of `--layers` layers and `--vocab-size` words (few
    by default, as the softmax over words costs the same with every scheme): a step of training
    (forward, loss of 15 % masked tokens, backward, Adam), a forward pass, and the step's peak memory,
    relative to `learned`; steps a second stand beside those without positions.  Tables are unclipped
    unless --position-clip-distance says otherwise, as the papers pre-train.  Candidates are timed in turns, each only
    once the machine is idle otherwise.
    """

    size: str = option("base", choices=("base", "small"))
    lengths: str = option("512", "separated by commas")
    batch_size: int = option(2, "rows", least=1)
    layers: int = option(2, "layers that are timed; 0: all", least=0)
    vocab_size: int = option(1000, "words that are timed", least=8)
    position_clip_distance: int | None = option(None, "0 (default): unclipped", metavar="K", least=0)
    dropout: float = option(0.0)
    fit: int = option(
        0,
        (
            "also search how many rows a training step holds in so much memory (Huang2020 section 3.6: "
            "16384, of a GPU); 0: do not"
        ),
        metavar="MIB",
        least=0,
    )
    schemes: str = option("all", "names separated by commas, or all")
    backends: str = option("auto", A_ROW_EACH)
    rounds: int = option(3, "samples of each (%(default)s)", group=HOW, least=1)
    seconds: float = option(120.0, "of a column (%(default)s)", group=HOW)

    def run(self, argv: Sequence[str]) -> None:
        logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
        from relpos_fairseq.lab.benchmarks.costs import benchmark

        benchmark(self)


@command("benchmark serving", "speed, memory and BLEU of fairseq-generate, relpos translate and CTranslate2")
class BenchmarkServing:
    """How fast one checkpoint translates, and how well: fairseq-generate, this package, CTranslate2.

        relpos benchmark serving checkpoints/checkpoint_best.pt --data data-bin/multi30k

    One table: sentences and tokens a second, peak memory, seconds of the start, and BLEU of
    fairseq-generate, of `relpos translate` in fp32, int8 and (where the processor has it) bf16, of CTranslate2
    in fp32 and int8 where it has the position scheme, and, untrained, of fairseq's transformer and
    transformers' Marian of the same shape, on the CPU with OMP_NUM_THREADS threads. Each timing has a
    process of its own. BLEU is of text.
    With --in-turns, another table: how many times as fast as CTranslate2's our search is on batches of so many
    sentences, each of which both are given in turns in one process.
    Needs pip install 'relpos_fairseq[ct2]'.
    """

    checkpoint: InFile = argument("checkpoint of a relpos_transformer")
    data: InFolder = required("its binarised data")
    split: str = option("test", "test or valid (default: test)")
    beam: int = option(4, "of every search (default: 4)", least=1)
    rounds: int = option(3, "times of each; the median counts (default: 3)", least=1)
    in_turns: str | None = option(None, "sizes of batches, separated by commas")
    symbols: int | None = option(None, "of each translation, with --in-turns (default: as the search ends)", least=1)

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.lab.benchmarks.serving import benchmark, in_turns
        from relpos_fairseq.lab.benchmarks.workload import lengths_of

        given = self.checkpoint, self.data, self.split, self.beam, self.rounds
        if self.in_turns is None:
            print(benchmark(*given))
        else:
            print(in_turns(*given, lengths_of(self.in_turns, flag="in-turns"), self.symbols))


@command("benchmark sampling", "speed and memory of relpos sample beside transformers' GPT-2 or Transformer-XL")
class BenchmarkSampling:
    """How fast a language model continues a prompt, beside transformers' model of the same shape.

        relpos benchmark sampling checkpoints/checkpoint_best.pt --prompt-tokens 512 --tokens 64

    One table, fp32 and int8: seconds until the first symbol, symbols a second after it and in all, peak
    memory, seconds of the start, on the CPU with OMP_NUM_THREADS threads. A checkpoint with memory stands
    beside transformers' Transformer-XL, another beside its GPT-2. Each timing has a process of its own.
    Needs pip install 'relpos_fairseq[transformers]'.
    """

    checkpoint: InFile = argument("checkpoint of a relpos_transformer_lm or relpos_transformer_xl")
    data: InFolder | None = option(None, "its data folder (default: the text beside the checkpoint)")
    prompt_tokens: int = option(512, "symbols of the prompt (default: 512)", least=1)
    tokens: int = option(64, "new symbols (default: 64)", least=2)
    batch_size: int = option(1, "texts at a time (default: 1)", least=1)
    rounds: int = option(3, "times of each; the median counts (default: 3)", least=1)

    def run(self, argv: Sequence[str]) -> None:
        from relpos_fairseq.lab.benchmarks.sampling import Workload, benchmark

        workload = Workload(self.prompt_tokens, self.tokens, self.batch_size)
        print(benchmark(self.checkpoint, self.data, workload, self.rounds))
