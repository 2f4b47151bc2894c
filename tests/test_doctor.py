"""`relpos doctor`: one screen, and a status that says whether something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.commands import relpos
from relpos_fairseq import doctor
from relpos_fairseq.attention import native
from relpos_fairseq.attention.native import build


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that there is, beside verdicts of this test alone."""
    monkeypatch.setattr(doctor.cache, "folders", lambda: iter([tmp_path]))
    monkeypatch.setattr(build, "problem", lambda dtype=None: None)


def test_a_sound_installation(capsys: pytest.CaptureFixture) -> None:
    assert relpos("doctor", "--quick") == 0
    said = capsys.readouterr().out
    assert said.endswith("nothing is wrong\n") and "WRONG" not in said
    lines = said.splitlines()
    assert len(lines) <= 24
    heads = "python relpos torch fairseq patches packages processor native gpu triton cache".split()
    assert [line.split()[0] for line in lines[: len(heads)]] == heads
    chosen = next(line for line in lines if line.startswith("512 tokens"))
    assert all(name in chosen for name in doctor.schemes_for(attention=True)) and "native: none" in chosen
    assert " fault (RELPOS_PATCHES=all; " in lines[heads.index("patches")]


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """No compiler, a verdict against a kernel."""
    monkeypatch.setattr(build, "problem", lambda dtype=None: "anything without a C compiler")
    verdict = {"gpu": "H200", "erred": ["64 queries: dq: typical error 1"], "call": "Trial(x)"}
    (tmp_path / "verdict-1.json").write_text(json.dumps(verdict), encoding="utf-8")
    assert relpos("doctor") == 1
    said = capsys.readouterr().out
    assert "native       WRONG: cannot evaluate anything without a C compiler" in said
    assert "verdict      WRONG: H200: 64 queries: dq: typical error 1: Trial(x)" in said
    assert "self-check" not in said and said.endswith("2 of these lines must be mended\n")


def test_the_self_check_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one scheme, in one gradient or in the output."""
    if isinstance(build._attempt(torch.float32), build.BuildError):
        pytest.skip("no C compiler")
    monkeypatch.setattr(doctor, "schemes_for", lambda attention: ["none", "m4"])
    assert doctor._self_check() == ("self-check", "native agrees with fp64: 2 schemes, values and gradients", False)
    attend = native.attend
    off = lambda inputs: attend(inputs) * (1 if not inputs.terms else 1.001)  # noqa: E731
    monkeypatch.setattr(native, "attend", off)
    _, said, wrong = doctor._self_check()
    assert wrong and "m4: 1 queries: output: typical error" in said and "none" not in said
