"""Kernels prove themselves on a device before `auto` takes them; broken ones do not.

The trial's process is a real one, of a copy of the package with a fault planted, interpreted.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

pytest.importorskip("triton", reason="triton is not installed")
from relpos_fairseq.attention import AttentionInputs, api, sdpa
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.attention.lowering import factors_of, rank_of
from relpos_fairseq.attention.triton import call_signature, kernel_args, selftest, selftest_cache
from relpos_fairseq.attention.triton.fused_attention import fused_attention as triton_attend
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import Decay, PositionTerms, Reset

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="needs TRITON_INTERPRET=1")
FORWARD, SELFTEST = (f"attention/triton/{name}.py" for name in ("forward", "selftest"))
SHORT = (SELFTEST, "(1, 63, 64, 65, 127, 192)", "(1, 3)")


def make_call(length: int = 5, learns: bool = True, **options) -> AttentionInputs:
    """A call with a table of scalars, in fp32."""
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=learns) for _ in range(3))
    term = PositionTerms(Clipped(2, 2), static=torch.zeros(1, 5, requires_grad=learns))
    return AttentionInputs(q, k, v, (term,), Positions(length, length), 0.25, **options)


def form_of(inputs: AttentionInputs) -> call_signature.CallSignature:
    return call_signature.signature_of(inputs, (False,) * len(inputs.terms), False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selftest_cache.cache, "folders", lambda: iter([tmp_path / "cache"]))
    monkeypatch.setattr(selftest_cache, "_found", {})
    api._warn_once.cache_clear()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let trials import a copy of the package in which texts are replaced."""

    def plant(*changes: tuple[str, str, str]) -> None:
        root = tmp_path / "copy"
        shutil.rmtree(root, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "relpos_fairseq", root / "relpos_fairseq", ignore=ignored)
        for file, before, after in changes:
            path = root / "relpos_fairseq" / file
            text = path.read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{before!r} in {file}"
            path.write_text(text.replace(before, after), encoding="utf-8")
        monkeypatch.setattr(selftest_cache, "ROOT", root)
        selftest_cache.sources.cache_clear()

    yield plant
    selftest_cache.sources.cache_clear()


def test_a_sound_kernel_and_a_broken_one(planted, caplog: pytest.LogCaptureFixture) -> None:
    """A verdict is kept for a kernel's sources, and read by the next process."""
    inputs = make_call()
    planted(SHORT)
    assert backend.unproved(inputs) is None
    ((path, verdict),) = selftest_cache.verdicts()
    assert verdict["erred"] == [] and verdict["gpu"] == "cpu" and "Clipped" in verdict["call"]
    planted(SHORT, (FORWARD, "out = acc * (dropout_scale / total)", "out = acc * (1.01 * dropout_scale / total)"))
    assert backend.unproved(inputs) is None, "a process asks once"
    selftest_cache._found.clear()
    said = backend.unproved(inputs)
    assert "1 queries: output: typical error" in said and "RELPOS_TRITON=on" in said
    assert len(list(selftest_cache.verdicts())) == 2, "another kernel has another verdict"
    selftest_cache._found.clear()
    (newer,) = {found for found, _ in selftest_cache.verdicts()} - {path}
    newer.write_text(json.dumps({**verdict, "erred": ["as kept"]}), encoding="utf-8")
    assert "as kept" in backend.unproved(inputs)


FAULTS = {
    "os._exit(9)": ("ended with status 9", True),
    "time.sleep(600)": ("no answer within 3 s", True),
    "torch.zeros = lambda *_, **__: [][0]": ("list index out of range", False),
}


def test_a_trial_imports_nothing_from_where_a_user_stands(planted, tmp_path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    planted(SHORT)
    assert selftest_cache.run(form_of(make_call())) == ([], True)


@pytest.mark.parametrize("fault", FAULTS)
def test_trials_without_a_result(fault: str, planted) -> None:
    """A death and silence are verdicts; a device without room for a second process is none."""
    begun = '    """Read a pickled signature and print what erred'
    planted((SELFTEST, begun, f"    import os, time\n    {fault}\n{begun}"))
    silent = "sleep" in fault
    erred, final = selftest_cache.run(form_of(make_call()), 3.0 if silent else 120.0)
    said, is_verdict = FAULTS[fault]
    assert said in erred[0] and final == is_verdict


def test_auto_and_the_verdict(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` falls back to blocked with one warning; RELPOS_TRITON decides instead of verdicts."""
    tried = []
    monkeypatch.setattr(selftest_cache, "run", lambda form: tried.append(form) or (["dq is NaN"], True))
    monkeypatch.setattr(api, "on_gpu", lambda inputs: True)
    for rule in ("_is_short", "_is_native"):
        monkeypatch.setattr(api, rule, lambda *_: False)
    with caplog.at_level(logging.WARNING):
        chosen = [api.choose(make_call(length)) for length in (5, 5, 70)]
    assert chosen == ["blocked"] * 3 and len(tried) == 1, "lengths share a verdict"
    (record,) = caplog.records
    assert "blocked is used, since triton" in record.getMessage() and "dq is NaN" in record.message
    api.choose(make_call(causal=True))
    assert len(tried) == 2, "masks do not"
    monkeypatch.setenv("RELPOS_TRITON", "on")
    assert api.choose(make_call()) == "triton"
    monkeypatch.setenv("RELPOS_TRITON", "off")
    assert api.choose(make_call()) == "blocked" and len(tried) == 2
    monkeypatch.setenv("RELPOS_TRITON", "yes")
    with pytest.raises(ValueError, match="RELPOS_TRITON must be on .* got 'yes'"):
        api.choose(make_call())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_gates_have_a_trial(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay's form is its own; its sums keep single precision; what forgets them errs."""
    monkeypatch.setattr(kernel_args, "launch_of", lambda *_: kernel_args.Launch(16, 16, 4, 1))
    inputs = make_call(9, causal=True)
    parts = {name: getattr(inputs, name).detach().to(dtype).requires_grad_() for name in "qkv"}
    decay = Decay(torch.zeros(1, 1, 9, requires_grad=True))
    inputs = replace(inputs, terms=(PositionTerms(decay=decay),), **parts)
    form = form_of(inputs)
    assert form != form_of(replace(inputs, terms=(PositionTerms(decay=Decay(decay.past.detach())),)))
    assert form != form_of(replace(inputs, terms=(PositionTerms(),)))
    assert selftest.problems(form, ()) == []
    seen, honest = [], triton_attend

    def forgetful(given: AttentionInputs) -> torch.Tensor:
        past = given.terms[0].decay.past
        seen.append(past.dtype)
        return honest(replace(given, terms=(PositionTerms(decay=Decay(past * 0.5)),)))

    assert selftest.problems(form, (), forgetful)[0].startswith("9 queries: ")
    assert set(seen) == {torch.float32}


def test_rank_of_a_decay() -> None:
    """Single precision holds its sums in one number each, half precision in three."""
    term = PositionTerms(decay=Decay(torch.zeros(1, 1, 5)), static_factors=2 * (torch.ones(1, 1, 5, 4),))
    assert [rank_of(term, dtype) for dtype in (torch.float32, torch.bfloat16)] == [6, 10]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_call(causal=True)
        inputs = replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in "qkv"})
        formed = sum(part[0].size(-1) for part in factors_of(term, inputs, dtype))
        assert formed == rank_of(term, dtype)


def test_one_of_several_ranks_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its verdict, and read it; what was not tried is not kept."""
    tried = []

    def run(form: call_signature.CallSignature) -> tuple[list[str], bool]:
        tried.append(form.device)
        time.sleep(0.3)
        return ["erred"], True

    monkeypatch.setattr(selftest_cache, "run", run)
    ranks = [replace(form_of(make_call()), device=f"cpu:{rank}") for rank in range(4)]
    monkeypatch.setattr(selftest_cache, "machine", lambda device: {"gpu": "one kind"})
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(selftest_cache.problem, ranks))
    assert len(tried) == 1 and len(found) == 1 and "erred" in found.pop()
    monkeypatch.setattr(selftest_cache, "run", lambda form: (["busy"], False))
    assert "busy" in selftest_cache.problem(form_of(make_call(causal=True)))
    assert len(list(selftest_cache.verdicts())) == 1


def odd_call() -> AttentionInputs:
    """Every kind of operand, resets, padding, dropout, keys before and after the queries."""
    draw = lambda *size: torch.randn(size, requires_grad=True)  # noqa: E731
    q, k, v = (draw(2, 2, rows, 16) for rows in (4, 9, 9))
    reset = Reset(draw(2), draw(2), torch.tensor([0, 1]))
    vectors = {"query_vectors": draw(2, 5, 16), "key_vectors": draw(1, 5, 16)}
    more = {"gate": draw(1, 5), "static": draw(2, 5), "value_vectors": draw(1, 5, 16)}
    terms = (
        PositionTerms(Clipped(2, 2), **vectors, **more, content_offset=draw(2, 16), reset=reset),
        PositionTerms(static_factors=(draw(1, 2, 4, 3), draw(2, 2, 9, 3))),
        PositionTerms(Clipped(2, 2), **vectors, product=True),
        PositionTerms(Clipped(2, 2), trilinear=draw(1, 5, 16)),
    )
    padding = torch.zeros(2, 9, dtype=torch.bool)
    return AttentionInputs(q, k, v, terms, Positions(4, 9, 3), 0.25, key_padding=padding, dropout=0.2)


def test_trials_of_every_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound kernels stay inside the budget; one number of one table that is off does not."""
    form, by_kernel, evaluated = form_of(odd_call()), selftest._by_kernel, []
    monkeypatch.setattr(kernel_args, "launch_of", lambda *_: kernel_args.Launch(16, 16, 4, 1))
    runs = iter(range(100))
    changes = {
        "": lambda found: found,
        "4 queries: 3.trilinear: ": lambda found: found[-1].flatten()[-1].mul_(2).add_(0.5),
        "4 queries: output differs from run to run": lambda found: found[0].add_(1e-6 * next(runs)),
    }

    def once(*given) -> list[torch.Tensor]:
        if not evaluated:
            evaluated.append(by_kernel(*given))
        found = [part.clone() for part in evaluated[0]]
        changes[said](found)
        return found

    monkeypatch.setattr(selftest, "_by_kernel", once)
    for said in changes:
        first = " ".join(selftest.problems(form, ())[:1])
        assert first.startswith(said) if said else not first
    monkeypatch.setattr(selftest, "_by_kernel", lambda *_: [][0])
    assert selftest.problems(form, ()) == ["4 queries: IndexError: list index out of range"]


def test_philox_by_the_published_vector() -> None:
    """Random123's known answers of philox4x32 with 7 rounds."""
    zeros = torch.zeros(1, dtype=torch.long)
    words = [int(word) for word in selftest.philox(0, zeros, zeros, zeros)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_never_meets_a_mask(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass gives NaN there (pytorch 196678); without a mask it stays allowed."""
    allowed = []

    def watch(q, k, v, **chosen):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    class OnGpu:
        is_cuda = True

    @contextmanager
    def chosen(kernels):
        allowed.append([kernel.name for kernel in kernels])
        with kernels_of_torch(kernels):
            yield

    kernels_of_torch = sdpa.sdpa_kernel
    monkeypatch.setattr(sdpa, "sdpa_kernel", chosen)
    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", watch)
    monkeypatch.setattr(sdpa, "_mask", lambda inputs: (OnGpu() if masked else None, False))
    sdpa.attend(replace(make_call(), terms=()))
    if masked:
        names, enabled = allowed
        assert "CUDNN_ATTENTION" not in names and not enabled
    else:
        assert allowed == [torch.backends.cuda.cudnn_sdp_enabled()]
