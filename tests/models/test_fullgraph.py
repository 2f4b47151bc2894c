"""torch.compile(fullgraph=True): a model with any scheme is one graph, which equals eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import FULL
from helpers.every_model import language_model, recurrent, roberta, translation
from helpers.lm_models import RELATIVE
from relpos_fairseq.attention import api, native
from relpos_fairseq.schemes import scheme_names

MODELS = (translation, language_model, recurrent, roberta)
EVERY = [
    (make, scheme)
    for scheme in scheme_names()
    for make in MODELS
    if not (make is recurrent and scheme not in RELATIVE) and not (make is roberta and scheme == "cope")
]
FEW = [*EVERY[:: 13 if FULL else 26], (translation, "tupe"), (recurrent, "m4m")]


# A graph takes seconds, and one more scheme in it little.  What no kernel evaluates, or not in an
# encoder, would keep the others from it, and is alone, as are schemes that no hybrid names.  Without RELPOS_ONNX=full
# every sixth is held (tests/nn compiles each form of terms).
TOGETHER = {
    "rope+shaw+m1+m4+t5+alibi_learned": {},
    "learned+m4m+rel_scalar+kerple+sandwich+log_cpb": {},
    "sinusoidal+m3+transformer_xl+alibi": {},
    "deberta+tupe+shaw_keys+m2+fire+xpos": {"position_scale": "2"},
    "sentence+tupe_a+abs_scalar+tupe_released": {"position_scale": "3"},
    "deberta_released+transformer_xl_learned": {"position_scale": "3"},
}
TOGETHER |= {name: {} for name in scheme_names() if name not in "+".join(TOGETHER).split("+")}


def held(make: Callable, scheme: str, backend: str = "eager", **values: str) -> None:
    """Hold a compiled model's output and gradients against the same model, not compiled."""
    torch._dynamo.reset()
    model, given, counts = make(scheme, **values)
    model = model.double()
    found = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        model.zero_grad()
        out = run(**given)[0][counts]
        out.square().mean().backward()
        found.append([out, *(part.grad for part in model.parameters())])
    for number, (right, got) in enumerate(zip(*found, strict=True)):
        assert (right is None) == (got is None), number
        if right is not None:
            torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("make", "scheme"), FEW)
def test_one_graph(make: Callable, scheme: str) -> None:
    """By the reference, as in any short input."""
    held(make, scheme)


@pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
@pytest.mark.parametrize("scheme", ["m4", "t5"])
def test_one_graph_with_the_kernel(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel in C, which the graph has as an operation."""
    monkeypatch.setattr(api, "crossover_length", lambda _: 1)
    taken, honest = [], native.attend
    monkeypatch.setattr(native, "attend", lambda inputs: taken.append(1) or honest(inputs))
    held(language_model, scheme, "aot_eager")
    assert len(taken) == 4  # two layers, once eager and once as the graph is made


@pytest.mark.slow
@pytest.mark.parametrize("schemes", TOGETHER if FULL else list(TOGETHER)[::6])
def test_every_scheme_with_the_kernel(schemes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `auto` takes it from some tokens on."""
    monkeypatch.setattr(api, "crossover_length", lambda _: 1)
    held(translation, schemes, **TOGETHER[schemes])
