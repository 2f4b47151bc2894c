"""Tables of all schemes, made from their declarations: for Markdown pages and for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relpos_fairseq.attention import AttentionInputs, blocked, native, sdpa, triton
from relpos_fairseq.core.calls import small_call
from relpos_fairseq.core.config import AUTO_CLIP, PositionConfig, resolve
from relpos_fairseq.core.options import Option, in_order
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme
from relpos_fairseq.io.files import write_text
from relpos_fairseq.schemes import scheme_class, scheme_names

BEGIN, END = "<!-- scheme {0}: begin -->", "<!-- scheme {0}: end -->"  # around a table in a Markdown file
BERT_BASE: dict[str, Any] = {"embed_dim": 768, "num_heads": 12, "max_positions": 512}
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
FAMILIES = {  # and what each is good for
    "none": "nothing tells positions; a decoder's mask alone does",
    "absolute": "a place's own vectors: the least cost, but no place beyond a table",
    "vectors": "a vector a distance, read by query and key: in their papers the best after pre-training",
    "scalars": "a number a distance: cheap; those that fall with a function are made for inputs longer than trained",
    "rotations": "of queries and keys: no table to learn, what most released language models have",
    "gates": "distances that the text decides, from what lies between: for decoders",
    "mixing": "a network over the logits of all heads, content and position: to be joined with a scalar",
    "hybrids": "any of these, joined by +, and another for each layer, parted by /",
}
SHORT_HEADINGS = ("`--position-scheme`", "paper and equation", "logits", "parameters in BERT-base")


def parameters(name: str) -> int:
    """Parameters that the scheme adds to BERT-base: 12 layers, 768, 12 heads, 512 positions.

    Those of a scheme for decoders alone are counted in a decoder of the same size.
    """
    shape = AttentionShape(**BERT_BASE, causal=scheme_class(name).causal_only)
    plan = resolve(PositionConfig(position_scheme=name), shape, "masked_lm")
    stack = Placement(plan)
    layers = [stack.layer_schemes(layer) for layer in range(LAYERS)]
    return sum(p.numel() for p in {p for part in (stack, *layers) for p in part.parameters()})


def backends(name: str) -> str:
    """Backends that evaluate the scheme's terms: in encoders and decoders, or in one alone."""
    causal = _served(small_call(name, causal=True))
    everywhere = [] if scheme_class(name).causal_only else _served(small_call(name))
    return ", ".join(module if module in everywhere else f"{module} (decoders)" for module in causal)


def _served(inputs: AttentionInputs) -> list[str]:
    served = [module.name for module in (sdpa, blocked) if module.refusal(inputs) is None]
    kernels = (native, triton)
    served += [module.name for module in kernels if module.refusal_anywhere(inputs) is None]
    return ["reference", *served]


def acts_on(scheme: type[PositionScheme]) -> str:
    """Where the scheme enters the transformer."""
    if scheme.own_scale is None:
        return "input"
    if scheme.rotates:
        return "q, k"
    fields = {field for term in small_call(scheme.name).terms for field in term.present}
    places = ["logits"] * bool(fields - {"value_vectors"})
    places += ["values"] * ("value_vectors" in fields)
    return ", ".join(places) or "-"


def clip(scheme: type[PositionScheme]) -> str:
    """What --position-clip-distance auto means."""
    if scheme.clip is None:
        return "-"
    return " / ".join(str(pair[scheme.clip == "scalars"]) for pair in AUTO_CLIP.values())


def rows() -> list[tuple[str, ...]]:
    """One row a scheme, under HEADINGS."""
    table: list[tuple[str, ...]] = []
    for name in scheme_names():
        scheme = scheme_class(name)
        info = scheme.info
        note = f" ({info.difference})" if info.difference else ""
        table.append(
            (
                f"`{name}`",
                info.source,
                info.logits,
                acts_on(scheme),
                scheme.default_share or "-",
                info.starts_at,
                clip(scheme),
                "its table" if scheme.table_limited else "any",
                f"{parameters(name):,}",
                info.published + note,
                backends(name),
            )
        )
    return table


def short_rows() -> list[tuple[str, ...]]:
    """Return (name, paper and equation, logits, parameters added to BERT-base) of every scheme."""
    infos = {name: scheme_class(name).info for name in scheme_names()}
    return [(f"`{name}`", info.source, info.logits, f"{parameters(name):,}") for name, info in infos.items()]


def markdown(headings: Sequence[str] = HEADINGS, lines: Sequence[Sequence[str]] | None = None) -> str:
    """Return a Markdown table; without arguments, that of all schemes with all that is known of each."""
    lines = [headings, tuple("---" for _ in headings), *(rows() if lines is None else lines)]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def family(name: str) -> str:
    """Return the family of a scheme, a key of FAMILIES, by what it is made of."""
    scheme = scheme_class(name)
    if scheme.rotates:
        return "rotations"
    if scheme.absolute:
        return "absolute"
    terms = small_call(name).terms
    if not scheme.uses_positions:
        return "mixing" if any(t.mixing is not None for t in terms) else "gates" if terms else "none"
    return "vectors" if scheme.clip == "vectors" or any(t.has_vectors for t in terms) else "scalars"


def listing(width: int = 80) -> str:
    """Return all schemes as lines for a terminal, by family: name, paper and equation, cut at a width in columns."""
    infos = {name: scheme_class(name).info for name in scheme_names()}
    longest = max(map(len, infos))
    found: dict[str, list[str]] = {key: [textwrap.fill(f"{key}: {text}", width)] for key, text in FAMILIES.items()}
    for name, info in infos.items():
        text = textwrap.shorten(f"{info.source}: {info.logits}", width - longest - 4, placeholder=" ...")
        found[family(name)].append(f"  {name:{longest}}  {text}")
    return "\n\n".join("\n".join(lines) for lines in found.values())


def description(name: str) -> str:
    """Return what is known of one scheme: equation, initial values, costs, backends, a line each, then its options.

    Raises:
        ValueError: There is no such scheme.
    """
    scheme, info = scheme_class(name), scheme_class(name).info
    lines = {
        "paper": info.source,
        "logits": info.logits,
        "acts on": acts_on(scheme),
        "one table for": scheme.default_share or "-",
        "starts at": info.starts_at,
        "clip distance": clip(scheme) + (" (translation / language model / RoBERTa)" if scheme.clip else ""),
        "longest input": "its table" if scheme.table_limited else "any",
        "parameters": f"{parameters(name):,} beside BERT-base's; published: {info.published}",
        "backends": backends(name),
    }
    first = (scheme.__doc__ or "").strip().partition("\n")[0]
    body = [
        textwrap.fill(f"{key:14} {text}", 80, subsequent_indent=" " * 15, break_on_hyphens=False)
        for key, text in lines.items()
    ]
    return "\n".join([f"{name}: {first}", *body, *map(_option, in_order(scheme.takes))])


def _option(option: Option) -> str:
    auto = f"; auto: {option.auto_text}" if option.auto_text else ""
    text = textwrap.fill(option.help + auto, 80, initial_indent=" " * 15, subsequent_indent=" " * 15)
    return f"{option.flag} {option.metavar}\n{text}"


TABLES = {"table": markdown, "list": lambda: markdown(SHORT_HEADINGS, short_rows())}


def renewed(text: str) -> str:
    """Return a Markdown text with the tables between its markers renewed.

    Raises:
        ValueError: The text has no markers.
    """
    found = [kind for kind in TABLES if BEGIN.format(kind) in text and END.format(kind) in text]
    if not found:
        begin, end = BEGIN.format("table"), END.format("table")
        raise ValueError(f"no {begin} ... {end} in the file: add both markers where the table shall stand")
    for kind in found:
        begin, end = BEGIN.format(kind), END.format(kind)
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{TABLES[kind]()}\n{end}{rest.split(end, 1)[1]}"
    return text


def renew(path: Path) -> None:
    """Renew the tables of schemes between their markers in a file."""
    write_text(path, renewed(path.read_text(encoding="utf-8")), renews=True)
