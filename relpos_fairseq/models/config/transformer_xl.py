"""The config of `relpos_transformer_xl`: a decoder's, and what memory needs."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum

from relpos_fairseq.config import help_text
from relpos_fairseq.models.config.language_model import LanguageModelFlags
from relpos_fairseq.models.transformer_xl.window_positions import KINDS
from relpos_fairseq.schemes import DEFAULT


@dataclass
class RelPosTransformerXLConfig(LanguageModelFlags):
    """As the paper's released code: layer norm after blocks, everything from N(0, 0.02)."""

    position_scheme: str = help_text(
        DEFAULT["segment_recurrence"], "position scheme, or several joined by +; any but an absolute one"
    )
    mem_len: int = help_text(150, "tokens before a segment that each layer remembers")
    eval_mem_len: Optional[int] = help_text(  # noqa: UP045
        None, "the same in evaluation; unset: --mem-len"
    )
    same_length: bool = help_text(False, "every token sees as many tokens as memory is long, itself included")
    absolute_memory: bool = help_text(
        False,
        "let positions that are added to the input, and begin anew with each segment, carry memory "
        "all the same: a demonstration of what that costs (Dai et al. 2019, section 3.3)",
    )
    window_positions: ChoiceEnum(KINDS) = help_text(
        KINDS[0],
        "absolute positions over memory and segment, which memory gets anew in every segment: "
        "first adds sinusoids to the first layer's input, every a learned table to every layer's "
        "(attn_type 2 and 3 of the paper's released code, whose position scheme is none)",
    )
    no_attention_bias: bool = help_text(
        False, "projections of attention without biases, as in the paper's released code"
    )
    output_bias: bool = help_text(False, "a bias for each output, as in the paper's released code")
    init_std: float = help_text(0.02, "standard deviation of initial weights")
    proj_init_std: float = help_text(0.01, "the same for the projections of adaptive embeddings")


def check_memory_flags(cfg: Any) -> None:
    """Refuse lengths of memory that make no sense.

    Raises:
        ValueError: names the flag, its value and the way out.
    """
    check_mem_len(cfg.mem_len, "--mem-len")
    evaluated = cfg.mem_len
    if cfg.eval_mem_len is not None:
        check_mem_len(cfg.eval_mem_len, "--eval-mem-len")
        evaluated = cfg.eval_mem_len
    if cfg.same_length and min(cfg.mem_len, evaluated) < 1:
        raise ValueError(
            f"--same-length shows each token as many tokens as memory is long, itself included: "
            f"--mem-len and --eval-mem-len must be >= 1, got {cfg.mem_len} and {evaluated}"
        )


def check_mem_len(mem_len: int, flag: str = "mem_len") -> None:
    """Refuse a negative length.

    Raises:
        ValueError: if it is.
    """
    if mem_len < 0:
        raise ValueError(f"mem_len must be >= 0, got {mem_len} ({flag}; 0 remembers nothing)")
