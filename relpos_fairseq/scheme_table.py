"""Make the table of all position schemes from their declarations: `relpos schemes`."""

from __future__ import annotations

from pathlib import Path

import torch

from relpos_fairseq.attention import AttentionInputs, blocked, native, sdpa, triton
from relpos_fairseq.config import AUTO_CLIP, PositionConfig, resolve
from relpos_fairseq.io.files import write_text
from relpos_fairseq.placement import Placement
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import AttentionShape, PositionScheme
from relpos_fairseq.schemes import scheme_class, scheme_names

BEGIN, END = "<!-- scheme table: begin -->", "<!-- scheme table: end -->"
BERT_BASE = {"embed_dim": 768, "num_heads": 12, "max_positions": 512}
LAYERS = 12
HEADINGS = (
    "`--position-scheme`",
    "source",
    "logits",
    "acts on",
    "shared by",
    "starts at",
    "clip (translation / LM / MLM)",
    "max length",
    "BERT-base parameters",
    "published",
    "backends",
)


def parameters(name: str) -> int:
    """Return how many parameters a scheme adds to BERT-base: 12 layers, 768 wide, 12 heads, 512 positions.

    Parameters of a scheme for decoders alone are counted in a decoder of the same size.
    """
    shape = AttentionShape(**BERT_BASE, causal=scheme_class(name).causal_only)
    plan = resolve(PositionConfig(position_scheme=name), shape, "masked_lm")
    stack = Placement(plan)
    layers = [stack.layer_schemes(layer) for layer in range(LAYERS)]
    return sum(p.numel() for p in {p for part in (stack, *layers) for p in part.parameters()})


def small_call(name: str, causal: bool = False) -> AttentionInputs:
    """Return a small attention call with the scheme's terms, from which the table reads what it consists of."""
    causal = causal or scheme_class(name).causal_only
    shape = AttentionShape(embed_dim=8, num_heads=2, max_positions=4, causal=causal)
    stack = Placement(resolve(PositionConfig(position_scheme=name), shape, "translation"))
    layer, positions = stack.layer_schemes(0), Positions(4, 4)
    context = stack.context(positions)
    terms = context.shared + layer.evaluate(positions).terms + layer.gated(torch.zeros(4, 1, 8))
    x = torch.zeros(1, 2, 4, 4)
    return AttentionInputs(x, x, x, terms, positions, 0.5, causal)


def backends(name: str) -> str:
    """Return the backends that evaluate the scheme's terms, those of decoders alone marked."""
    causal = _served(small_call(name, causal=True))
    everywhere = [] if scheme_class(name).causal_only else _served(small_call(name))
    return ", ".join(module if module in everywhere else f"{module} (decoders)" for module in causal)


def _served(inputs: AttentionInputs) -> list[str]:
    served = [module.name for module in (sdpa, blocked) if module.refusal(inputs) is None]
    kernels = (native, triton)
    served += [module.name for module in kernels if module.refusal_anywhere(inputs) is None]
    return ["reference", *served]


def acts_on(scheme: type[PositionScheme]) -> str:
    """Return what the scheme changes: the input, q and k, logits, values."""
    if scheme.own_scale is None:
        return "input"
    if scheme.rotates:
        return "q, k"
    fields = {field for term in small_call(scheme.name).terms for field in term.present}
    places = ["logits"] * bool(fields - {"value_vectors"})
    places += ["values"] * ("value_vectors" in fields)
    return ", ".join(places) or "-"


def clip(scheme: type[PositionScheme]) -> str:
    """Return the clip distances that --position-clip-distance auto gives: translation, LM, MLM."""
    if scheme.clip is None:
        return "-"
    return " / ".join(str(pair[scheme.clip == "scalars"]) for pair in AUTO_CLIP.values())


def rows() -> list[tuple[str, ...]]:
    """Return one row for each scheme, under HEADINGS."""
    table = []
    for name in scheme_names():
        scheme = scheme_class(name)
        card = scheme.card
        note = f" ({card.difference})" if card.difference else ""
        table.append(
            (
                f"`{name}`",
                card.source,
                card.logits,
                acts_on(scheme),
                scheme.default_share or "-",
                card.starts_at,
                clip(scheme),
                "its table" if scheme.table_limited else "any",
                f"{parameters(name):,}",
                card.published + note,
                backends(name),
            )
        )
    return table


def markdown() -> str:
    """Return the table as Markdown."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *rows()]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def renewed(text: str) -> str:
    """Return `text` with a new table between its markers; a text without them is refused."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"no {BEGIN} ... {END} in the file: add both markers where it shall stand")
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{markdown()}\n{END}{rest.split(END, 1)[1]}"


def renew(path: Path) -> None:
    """Write a new table between the markers of a file."""
    write_text(path, renewed(path.read_text(encoding="utf-8")))
