"""Every option of every scheme has a row in cases.py in which it does something."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import BEYOND, CASES, Case
from helpers.scheme_calls import call
from relpos_fairseq.attention import attend
from relpos_fairseq.core.options import RANDOMIZATION
from relpos_fairseq.schemes import scheme_class, scheme_names


def computed(case: Case, kind: str) -> tuple[list[torch.Size], Tensor] | None:
    """The parameters' shapes and the output of a call; None: its flags are refused."""
    try:
        inputs, stack, layer, _ = call(case, kind)
    except ValueError:
        return None
    return [part.shape for part in (*stack.parameters(), *layer.parameters())], attend(inputs, "reference")[0]


def matters(case: Case, flag: str) -> bool:
    """Whether a row without the flag is refused, or computes something else in some call."""
    without = Case(case.scheme, {name: value for name, value in case.flags.items() if name != flag})
    for kind in ("square", "causal", "pad_left"):
        found, other = computed(case, kind), computed(without, kind)
        if found is not None and (other is None or found[0] != other[0] or not torch.allclose(found[1], other[1])):
            return True
    return False


@pytest.mark.parametrize("name", scheme_names())
def test_every_option_has_a_row_in_which_it_does_something(name: str) -> None:
    rows = [case for case in (*CASES, *BEYOND) if name in case.scheme.split("+")]
    for option in scheme_class(name).takes - RANDOMIZATION:
        if not option.training_only:
            flag = option.field
            mine = [case for case in rows if flag in case.flags]
            assert mine, f'add a row Case("{name}", {{"{flag}": ...}}) to tests/cases.py, with another value than auto'
            assert any(matters(case, flag) for case in mine), (
                f"{name}: {flag} changes nothing in {', '.join(map(str, mine))}"
            )
