"""Which checkpoints lie in golden.tar.xz, and the outputs by which they are recognised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SIZES = {
    side: (
        *(f"--{side}-embed-dim", "8", f"--{side}-ffn-embed-dim", "8"),
        *(f"--{side}-attention-heads", "2", f"--{side}-layers", "1"),
    )
    for side in ("encoder", "decoder")
}
# No dropout: another order of drawing random numbers is no other training.
TRAIN = (
    *("--optimizer", "adam", "--lr", "0.1", "--max-update", "2", "--batch-size", "4"),
    *("--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0"),
    *("--disable-validation", "--no-epoch-checkpoints", "--distributed-world-size", "1"),
    *("--seed", "1", "--log-interval", "1", "--cpu", "--num-workers", "0", "--no-progress-bar"),
)
TRANSLATION = (
    *("--task", "translation", "--arch", "relpos_transformer_tiny", "--share-all-embeddings"),
    *("--max-source-positions", "16", "--max-target-positions", "16"),
    *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1"),
    *SIZES["encoder"],
    *SIZES["decoder"],
)
LM = (
    *("--task", "language_modeling", "--arch", "relpos_transformer_lm_tiny"),
    *("--tokens-per-sample", "16"),
    *SIZES["decoder"],
)
XL = (
    *("--task", "segment_language_modeling", "--arch", "relpos_transformer_xl_tiny"),
    *("--share-decoder-input-output-embed", "--tokens-per-sample", "6", "--mem-len", "5"),
    *SIZES["decoder"],
)
ROBERTA = ("--arch", "relpos_roberta_tiny", *SIZES["encoder"])
MASKED_LM = (
    *("--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", "16"),
    *("--sample-break-mode", "complete", "--mask-prob", "0.4", *ROBERTA),
)
PAIRS = (
    *("--task", "sentence_prediction", "--criterion", "sentence_prediction_glue"),
    *("--num-classes", "2", "--init-token", "0", "--separator-token", "2"),
    *("--max-positions", "24", *ROBERTA),
)
QUESTIONS = (
    *("--task", "question_answering", "--criterion", "question_answering"),
    *("--tokens-per-sample", "40", "--doc-stride", "8", "--max-query-length", "12", *ROBERTA),
)
# Kind of model: its folder of data, and its flags.
KINDS = {
    "translation": ("pair", TRANSLATION),
    "lm": ("text", LM),
    "xl": ("text", XL),
    "masked_lm": ("text", MASKED_LM),
    "pairs": ("pairs", PAIRS),
    "questions": ("questions", QUESTIONS),
}
# The first four are kept with their optimizer's state, for a resume under the same flags.
CASES = {
    "translation": ("--position-scheme", "m4m"),
    "lm": ("--position-scheme", "m4"),
    "xl": ("--position-scheme", "transformer_xl"),
    "masked_lm": ("--position-scheme", "learned"),
    "pairs": ("--position-scheme", "m4", "--segment-encoding", "head"),
    "questions": ("--position-scheme", "shaw", "--segment-encoding", "head"),
}
RESUMED = [*CASES][:4]


def flags_of(case: str) -> tuple[str, ...]:
    """The command line of fairseq-train, without paths."""
    small = () if case in RESUMED else ("--no-save-optimizer-state",)
    return (*KINDS[case][1], *TRAIN, *CASES[case], *small)


def tokens(rows: int, length: int, seed: int, size: int) -> Tensor:
    """(rows, length) token ids without special ones; no generator's stream is needed."""
    places = torch.arange(rows * length)
    return (4 + (places * places * 7 + places * seed + 3) % (size - 4)).view(rows, length)


@torch.no_grad()
def outputs_of(case: str, model: nn.Module) -> dict[str, Tensor]:
    """Logits for fixed inputs, and those of decoding token by token."""
    model.eval()
    return _OUTPUTS[case](model)


def _translation(model: nn.Module) -> dict[str, Tensor]:
    source, target = tokens(2, 9, 5, 12), tokens(2, 7, 11, 12)
    source[:, -1] = target[:, 0] = 2
    source[1, :2] = 1
    encoded = model.encoder(source, source.ne(1).sum(1))
    state: dict = {}
    steps = [
        model.decoder(target[:, : t + 1], encoder_out=encoded, incremental_state=state)[0]
        for t in range(target.size(1))
    ]
    whole = model(source, source.ne(1).sum(1), target)[0]
    return {"logits": whole, "steps": torch.cat(steps, dim=1)}


def _lm(model: nn.Module) -> dict[str, Tensor]:
    read = tokens(2, 11, 5, 12)
    read[:, 0] = read[1, 4] = 2
    state: dict = {}
    steps = [model.decoder(read[:, : t + 1], incremental_state=state)[0] for t in range(read.size(1))]
    return {"logits": model(read)[0], "steps": torch.cat(steps, dim=1)}


def _xl(model: nn.Module) -> dict[str, Tensor]:
    read = tokens(2, 15, 5, 12)
    first, extra = model(read[:, :6])
    second, _ = model(read[:, 6:12], memory=extra["memory"])
    state: dict = {}
    steps = [model(read[:, 6:t], memory=extra["memory"], incremental_state=state)[0] for t in range(7, 16)]
    return {"first": first, "second": second, "steps": torch.cat(steps, dim=1)}


def _sentences(size: int) -> Tensor:
    """Two rows of `<s> a </s> </s> b </s>`, the second one padded."""
    read = tokens(2, 12, 5, size - 1)
    read[:, 0] = 0
    read[:, 5:7] = read[:, 11] = 2
    read[1, 9] = 2
    read[1, 10:] = 1
    return read


def _masked_lm(model: nn.Module) -> dict[str, Tensor]:
    read = _sentences(13)
    return {
        "logits": model(read)[0],
        "features": model(read, features_only=True)[0],
        "masked": model(read, masked_tokens=read.eq(7))[0],
    }


def _segments(read: Tensor) -> Tensor:
    """0 in the first sentence, 1 in the second, as the tasks count."""
    numbers = torch.zeros_like(read)
    numbers[:, 6:] = 1
    return numbers


def _pairs(model: nn.Module) -> dict[str, Tensor]:
    read = _sentences(13)
    head = {"features_only": True, "classification_head_name": "sentence_classification_head"}
    return {"logits": model(read, segments=_segments(read), **head)[0]}


def _questions(model: nn.Module) -> dict[str, Tensor]:
    read = _sentences(30)
    head = {"features_only": True, "span_head_name": "question_answering"}
    return {"spans": model(read, segments=_segments(read), **head)[0]}


_OUTPUTS = {
    "translation": _translation,
    "lm": _lm,
    "xl": _xl,
    "masked_lm": _masked_lm,
    "pairs": _pairs,
    "questions": _questions,
}
