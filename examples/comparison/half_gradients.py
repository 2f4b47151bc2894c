"""How far are gradients in bf16 and fp32 from those in fp64?  A table, of one batch and untrained models.

python examples/comparison/half_gradients.py          # a minute; slower where the processor does not multiply bf16
"""

from __future__ import annotations

from argparse import Namespace

import torch
from fairseq.data import Dictionary

import relpos_fairseq.plugin  # noqa: F401  (it registers the models)
from relpos_fairseq.io.progress import table
from relpos_fairseq.models.relpos_transformer import RelPosTransformerConfig, RelPosTransformerModel
from relpos_fairseq.patches.training import sum_in_fp32

SCHEMES = ("none", "learned", "shaw", "t5", "m4", "m4m", "deberta", "rope", "fox")
WORDS, ROWS, LENGTH = 4000, 128, 24


def gradients(scheme: str, dtype: torch.dtype, tokens: torch.Tensor, ours: bool = False) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter in fp64, of label probabilities as fairseq's criterion forms them.

    `ours`: as fairseq-train sums the gradients of norms and embeddings with this package, else as torch does.
    """
    words = Dictionary()
    for number in range(WORDS):
        words.add_symbol(f"w{number}")
    config = RelPosTransformerConfig(position_scheme=scheme, share_all_embeddings=True, dropout=0.0)
    for side in ("encoder", "decoder"):
        for part, value in (("embed_dim", 256), ("ffn_embed_dim", 1024), ("layers", 3), ("attention_heads", 4)):
            setattr(config, f"{side}_{part}", value)
    torch.manual_seed(1)
    task = Namespace(source_dictionary=words, target_dictionary=words)
    model = RelPosTransformerModel.build_model(config, task).to(dtype).train()
    if ours:
        sum_in_fp32(model)
    output = model(tokens, torch.full((ROWS,), LENGTH), tokens.roll(1, 1))
    log_probs = model.get_normalized_probs(output, log_probs=True)
    torch.nn.functional.nll_loss(log_probs.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def error(found: dict, exact: dict, word: str = "") -> float:
    """Return the distance of gradients, those of names with a word in them, relative to the exact ones' length."""
    names = [name for name in exact if word in name]
    apart = sum((found[name] - exact[name]).square().sum() for name in names)
    return float((apart / sum(exact[name].square().sum() for name in names)).sqrt())


def percent(share: float) -> str:
    """Return a share as per cent, in two digits."""
    return f"{100 * share:.2g} %"


if __name__ == "__main__":
    drawn = torch.randint(4, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = []
    for scheme in SCHEMES:
        exact = gradients(scheme, torch.float64, drawn)
        row = [scheme]
        for dtype, ours in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            found = gradients(scheme, dtype, drawn, ours)
            row += [percent(error(found, exact, word)) for word in ("", "layer_norm.bias")]
        has_tables = any(".position" in name for name in exact)
        rows.append([*row, percent(error(found, exact, ".position")) if has_tables else "-"])
    kinds = ("fp32", "bf16 by torch", "bf16 by fairseq-train")
    columns = [f"{kind}, {which}" for kind in kinds for which in ("all", "norms' biases")]
    print(table(rows, ["scheme", *columns, "position's"]))
