"""Candidates are compared with fp64 before they are timed, and what was measured is reported."""

from __future__ import annotations

import csv
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cases import CASES, INPUT, Case
from helpers import FULL, ROOT, processes
from helpers.commands import relpos
from helpers.shell import Shell
from relpos_fairseq.attention import attend
from relpos_fairseq.attention.inputs import probabilities
from relpos_fairseq.lab.benchmarks import attention, candidates, measurement
from relpos_fairseq.lab.benchmarks.attention import _compared
from relpos_fairseq.lab.benchmarks.candidates import LayerCandidate, NoPositions, SchemeCandidate, runner
from relpos_fairseq.lab.benchmarks.workload import AttentionSetting, draw_heads
from relpos_fairseq.schemes import schemes_for

TINY = "--heads 2 --head-dim 8 --position-clip-distance 3 --rounds 2 --seconds 1"
TINY = f"benchmark attention {TINY} --threads {torch.get_num_threads()}"
CPU = torch.device("cpu")


def setting(length: int = 20, batch: int = 2, causal: bool = False, **other) -> AttentionSetting:
    """A small one."""
    given = {"heads": 2, "head_dim": 8, "clip": 3, "dtype": torch.float32, "device": CPU} | other
    return AttentionSetting(batch=batch, length=length, causal=causal, **given)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, shell: Shell) -> None:
    """Every mode gives a cell; the tables go where they are asked to."""
    path, picture = tmp_path / "README.md", tmp_path / "plot.svg"
    path.write_text("# Numbers\n")
    line = f"{TINY} --lengths 20,8 --max-tokens 40 --schemes none,m4,tupe --modes train,forward,decode,memory --naive"
    out = shell(f"{line} --csv rows.csv --write README.md --plot plot.svg")
    text = path.read_text()
    assert "6 candidates right against fp64" in out and "not idle" in out
    assert text.startswith("# Numbers\n") and text.count("| m4 |") == 4
    assert text.count("| m4, naive |") == 3 and " MiB" in text and "nan" not in text
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert {row["mode"] for row in rows} == {"train", "forward", "decode", "memory"}
    assert {row["length"] for row in rows} == {"8", "20"}
    assert all(float(row["ms"]) > 0 for row in rows if row["mode"] != "memory")
    assert picture.read_text().count("<svg") == 1
    assert not list(tmp_path.glob("*partial*"))


def test_a_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """What the file has is not measured again; other settings keep their rows."""
    path, calls = tmp_path / "rows.csv", []
    honest = measurement.time_in_turns

    def counted(runs, *rest):
        calls.append(sorted(runs))
        return honest(runs, *rest)

    monkeypatch.setattr(measurement, "time_in_turns", counted)
    line = f"{TINY} --lengths 12 --max-tokens 12 --csv rows.csv"
    shell(f"{line} --schemes m4 --modes train")
    for more, measured in {
        "--schemes m4 --modes train": 0,
        "--schemes m4 --modes train,forward": 1,
        "--schemes m4 --modes train --position-clip-distance 2": 1,
        "--schemes m4,t5 --modes train": 1,
    }.items():
        before = len(calls)
        shell(f"{line} {more} --resume")
        assert len(calls) - before == measured, more
    assert calls[-1] == sorted([candidates.BASELINE, "m4", "t5"])
    rows = measurement.read_csv(path)
    assert len(rows) == 2 + 2 + 3  # forward; clip 2; what m4's first column has become
    assert sum(row["clip"] == 2 for row in rows) == 2
    assert "--resume continues it" in shell.refused(f"{line} --schemes m4 --modes train")  # nothing is written over
    assert measurement.read_csv(path) == rows


@pytest.mark.slow
def test_each_command_has_its_section(tmp_path: Path, shell: Shell) -> None:
    """Other lengths, modes and backends do not write over the tables that a page has."""
    ways = (
        "",
        " --lengths 6",
        " --lengths 6 --modes memory",
        " --lengths 6 --causal",
        " --lengths 6 --backends blocked",
    )
    for number, more in enumerate(ways, 1):
        for _ in range(2):
            shell(f"{TINY} --max-tokens 12 --schemes m4 --write page.md --modes forward --lengths 12{more}")
        assert (tmp_path / "page.md").read_text().count(": begin -->") == number


def test_backends_side_by_side(tmp_path: Path, shell: Shell) -> None:
    """A row each, held against fp64 each; what `auto` took is said, and is in the file."""
    path, sizes = tmp_path / "rows.csv", "--lengths 40 --max-tokens 40 --modes forward --rounds 1"
    out = shell(f"{TINY} {sizes} --schemes none,m4,shaw --backends auto,blocked --csv rows.csv")
    assert "6 candidates right against fp64" in out
    assert "| m4 |" in out and "| m4, blocked |" in out
    (m4,) = [row for row in measurement.read_csv(path) if row["name"] == "m4"]
    assert f"Evaluated by `{m4['backend']}`, `sdpa` (none at 40)." in out
    (other,) = [row for row in measurement.read_csv(path) if row["name"] == "m4, blocked"]
    assert other["backend"] == "blocked" and m4["backend"] in ("native", "blocked")


def test_a_whole_layer(shell: Shell) -> None:
    """The layer's table says that it is one."""
    sizes = "--lengths 12 --max-tokens 24 --modes train,forward,memory --unclipped"
    out = shell(f"{TINY} {sizes} --schemes shaw --layer")
    assert "a BERT layer" in out and "unclipped" in out and out.count("| shaw |") == 3


def test_needs_torch_alone() -> None:
    """Without fairseq, tqdm and what else a training environment has, it runs."""
    blocked = "fairseq", "omegaconf", "hydra", "sacrebleu", "tqdm", "matplotlib", "pandas"
    line = f"{TINY} --lengths 12 --max-tokens 12 --schemes m4"
    program = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "from relpos_fairseq.lab.benchmarks import measurement\n"
        "measurement.wait_until_idle = lambda *_: False\n"
        "from relpos_fairseq.cli.main import main\n"
        f"sys.exit(main({line.split()}))"
    )
    done = processes.run([sys.executable, "-c", program], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| m4 |" in done.stdout


# --- is it right? --------------------------------------------------------------------------------


def wrong_rows(start: int, factor: float = 1.001):
    """`attend`, but for rows from `start`, which err by a factor."""

    def wrong(inputs, backend):
        out, probs = attend(inputs, backend)
        if backend != "reference":
            out = torch.cat([out[:, :, :start], out[:, :, start:] * factor], dim=2)
        return out, probs

    return wrong


@pytest.mark.parametrize(("start", "factor"), [(0, 1.001), (290, 1.001), (0, float("nan"))])
def test_what_is_wrong_is_not_timed(start, factor, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """What errs, be it in the last rows of a long call, is named, and not timed."""
    monkeypatch.setattr(candidates, "attend", wrong_rows(start, factor))
    monkeypatch.setattr(measurement, "time_in_turns", lambda *_: pytest.fail("it is timed"))
    assert "error: m4 at length 300" in shell.refused(f"{TINY} --lengths 300 --max-tokens 300 --schemes m4")


def test_wrong_gradients_are_seen() -> None:
    """Values alone do not pass."""

    class Detached(SchemeCandidate):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().__call__(q, k.detach(), v)

    with pytest.raises(ValueError, match="errs"):
        attention.check(Detached("m4", setting()))


def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of decoding is checked as well."""
    scheme = SchemeCandidate("m4", setting())
    assert attention.check_step(scheme) <= attention.MOST
    monkeypatch.setattr(candidates, "attend", wrong_rows(0))
    with pytest.raises(ValueError, match="m4 at length 20"):
        attention.check_step(scheme)


@pytest.mark.parametrize("name", ["fox", "cable"])
def test_a_step_of_more_rows_than_a_batch_has_gates(name: str) -> None:
    scheme = SchemeCandidate(name, setting(causal=True))
    assert attention.check_step(scheme) <= attention.MOST
    assert runner(scheme, "decode")().size(0) > 2


def test_neutral_tables_are_moved() -> None:
    """A gate of ones or a bias of zeros would hide a wrong row."""
    for name in ("m2", "rel_scalar", "tupe"):
        for parameter in SchemeCandidate(name, setting()).parameters():
            assert parameter.detach().unique().numel() == parameter.numel()


def test_rows_that_are_checked() -> None:
    """First, middle and last rows, apart, few where the formula's tensor is large."""
    assert attention.some_rows("m4", setting(40)) == [(0, 40)]
    rows = attention.some_rows("m4", setting(500))
    assert rows == [(0, 16), (253, 269), (484, 500)]
    large = setting(16384, 1, heads=12, head_dim=64)
    (_, count), *_ = attention.some_rows("m3", large)
    assert 1 <= count < 16 and count * 12 * 16384 * 64 <= attention.ELEMENTS


# --- candidates ----------------------------------------------------------------------------------


def test_the_layer_is_torchs() -> None:
    """Without positions it is nn.TransformerEncoderLayer."""
    torch.manual_seed(0)
    layer = LayerCandidate(NoPositions("plain", setting()))
    oracle = torch.nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
    body = layer.body
    parts = [body[name] for name in ("query", "key", "value")]
    with torch.no_grad():
        oracle.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        oracle.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    rest = (oracle.self_attn.out_proj, oracle.linear1, oracle.linear2, oracle.norm1, oracle.norm2)
    for mine, theirs in zip(("out", "widen", "narrow", "first_norm", "second_norm"), rest, strict=True):
        theirs.load_state_dict(body[mine].state_dict())
    (x,) = layer.inputs()
    torch.testing.assert_close(layer(x), oracle(x), rtol=1e-4, atol=1e-5)


def test_training_wants_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timed step goes back to q, k, v and every parameter."""
    wanted = []
    monkeypatch.setattr(torch.autograd, "grad", lambda out, inputs, *_, **__: wanted.append(list(inputs)))
    scheme = SchemeCandidate("shaw", setting())
    runner(scheme, "train")()
    assert len(wanted[0]) == 3 + len(scheme.parameters()) == 5


FLEXIBLE = [
    case
    for case in CASES
    if case.scheme not in INPUT
    and not {"m3", "shaw", "dape"} & set(case.scheme.split("+"))
    and not case.flags
    and not case.causal_only
]


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_all_schemes_are_those_that_the_call_allows(causal: bool) -> None:
    names = schemes_for(causal, attention=True)
    assert ("cope" in names) == causal
    for name in names:
        SchemeCandidate(name, setting(9, causal=causal), "reference")


def test_few_numbers_err_by_chance() -> None:
    """A gradient of one number may err as other results do; one of many is held to its own."""
    large, cpu = torch.ones(100, dtype=torch.float64), setting(9)
    off = large * (1 + 40 * 2**-23)
    for numbers, fails in ((large[:1], False), (large, True)):
        found = [off.float(), (numbers * (1 + 50 * 2**-23)).float()]
        held = [large, numbers], [off.float(), numbers.float()], found, cpu
        if fails:
            with pytest.raises(ValueError, match="errs 12.5 times what the formula errs"):
                _compared("m4", *held)
        else:
            assert 1 < _compared("m4", *held) < 2


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("case", FLEXIBLE, ids=str)
def test_score_mods_are_the_formula(case: Case, causal: bool) -> None:
    """A score_mod applied to every logit gives the formula's output and gradients."""
    exact = setting(9, causal=causal)
    schemes = [SchemeCandidate(case.scheme, exact, dtype=torch.float64) for _ in range(2)]
    found = []
    for scheme, flexible in zip(schemes, (True, False), strict=True):
        leaves = [part.double().requires_grad_() for part in draw_heads(exact)]
        inputs = scheme.call(*leaves)
        out = by_score_mod(inputs) if flexible else attend(inputs, "reference")[0]
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        wanted = [*leaves, *scheme.parameters()]
        back = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)
        found.append([out, *(torch.zeros(()) if part is None else part for part in back)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, check_dtype=False)


def by_score_mod(inputs) -> Tensor:
    """Attention as FlexAttention defines it, every logit at once."""
    q, k = (inputs.content_q, inputs.content_k) if inputs.rotated else (inputs.q, inputs.k)
    scores = q @ k.transpose(-1, -2) * inputs.scale
    grid = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    mod = candidates.score_mod(inputs)
    scores = scores if mod is None else mod(scores, *grid)
    return probabilities(scores, inputs.excluded(), False) @ inputs.v


def test_flex_says_what_it_cannot() -> None:
    """Neither a replaced content nor value vectors, and on a CPU no backward pass."""
    assert "q.k" in candidates.Flex("m3", setting()).refusal("forward")
    assert "values" in candidates.Flex("shaw", setting()).refusal("forward")
    assert candidates.Flex("m4", setting()).refusal("forward") is None
    assert "no backward" in candidates.Flex("m4", setting()).refusal("train")


def test_a_compiler_that_fails_is_a_remark(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """The other candidates are measured all the same."""

    def fails(*_, **__):
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(candidates.Flex, "__call__", fails)
    out = shell(f"{TINY} --lengths 12 --max-tokens 12 --schemes m4,m3 --flex --modes forward")
    assert "- m4, FlexAttention: not compiled on this machine: no C++ compiler\n" in out
    assert "- m3, FlexAttention: a score_mod cannot replace q.k" in out and "| m4 |" in out


@pytest.mark.slow
def test_flex_is_compiled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """FlexAttention is timed where it is right, and refused in words where it is not.

    On some processors torch compiles it to wrong numbers, NaN among them: each night (RELPOS_ONNX=full).
    """
    if not FULL:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    seen, honest = [], candidates.Flex.__call__

    def kept(self: candidates.Flex, *given: Tensor) -> Tensor:
        out = honest(self, *given)
        seen.append((self.setting, given, out.detach()))
        return out

    monkeypatch.setattr(candidates.Flex, "__call__", kept)
    sizes = "--head-dim 16 --lengths 40 --max-tokens 40"
    status = relpos(*f"{TINY} {sizes} --schemes m4 --flex --modes forward --causal".split())
    out, err = capsys.readouterr()
    if "not compiled on this machine" in out:
        pytest.skip("torch.compile does not work here")
    there, given, found = seen[0]  # what it was judged by
    formula = SchemeCandidate("m4", there, "reference", torch.float64)
    with torch.no_grad():
        exact = attend(formula.call(*(part.double() for part in given)), "reference")[0]
    if torch.allclose(found.double(), exact, atol=1e-4, rtol=1e-4):
        assert status == 0 and "2 candidates right against fp64" in out
        assert "| m4, FlexAttention |" in out
    else:
        assert status != 0 and "| m4, FlexAttention |" not in out
        assert "m4, FlexAttention at length 40" in err and "it is not timed" in err


def test_what_a_gpu_cannot_hold_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the column is measured."""

    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "runner", lambda *_: full)
    run = attention.AttentionRun(None, {}, measurement.RowLog(None))
    there = SimpleNamespace(label="m4, naive", setting=setting(64, device=torch.device("cuda")))
    assert not attention._fits(run, there, "train")
    assert run.notes == ["m4, naive, train: not at 64, out of memory"]
    assert attention._fits(run, SimpleNamespace(setting=setting()), "train")


# --- times, memory, tables -----------------------------------------------------------------------


def test_times_are_taken_in_turns() -> None:
    """A B A B, each as often as the rounds say; all is counted."""
    order, ticks = [], []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times, noisy = measurement.time_in_turns(runs, 3, 1e9, lambda: ticks.append(None))
    turns = [name for name, after in zip(order, [*order[1:], ""], strict=True) if name != after]
    assert turns == ["a", "b"] * 4  # the first calls, then three rounds
    assert noisy == 6 and times["a"].noisy == 3 and len(times["b"].samples) == 3
    assert len(ticks) == 2 + 6


def test_a_column_ends_in_time() -> None:
    """Three rounds are made whatever they last; then the limit holds."""
    times, _ = measurement.time_in_turns({"a": lambda: None}, 50, 0.0)
    assert len(times["a"].samples) == 3
    times, _ = measurement.time_in_turns({"a": lambda: None}, 1, 0.0)
    assert len(times["a"].samples) == 1


def test_kept_storage_counts_as_memory() -> None:
    """What a thread keeps for its next call belongs to the peak; errors come out."""
    kept = threading.local()

    def run() -> None:
        if not hasattr(kept, "cells"):
            kept.cells = torch.ones(12 << 20)

    found = measurement.peak_mebibytes(run, CPU)
    assert found != found or found > 40  # 48 MiB; nan where there is no /proc

    def fails() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("inside")

    if found == found:
        with pytest.raises(ValueError, match="inside"):
            measurement.peak_mebibytes(fails, CPU)


def test_spread_and_sections(tmp_path: Path) -> None:
    """Quartiles relative to the median; a section is replaced, its neighbours are kept."""
    times = measurement.Times([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (times.median, times.least) == (3.0, 1.0)
    assert times.spread == pytest.approx((4.5 - 1.5) / 2 / 3)
    path = tmp_path / "page.md"
    measurement.write_section(path, "one", "first")
    measurement.write_section(path, "two", "second")
    measurement.write_section(path, "one", "third")
    text = path.read_text()
    assert "first" not in text and text.index("third") < text.index("second")


def row(name: str, mode: str = "train", length: int = 512, **other) -> dict:
    """A row of measurement."""
    given = {"device": "cpu", "view": "attention", "clip": 16, "least_ratio": 1.2} | other
    return {"name": name, "mode": mode, "length": length, **given}


def test_backends_in_words() -> None:
    """The most frequent one first; the others with the schemes and lengths they were taken for."""
    rows = [row(name, length=length, backend="native") for name in "abc" for length in (512, 2048)]
    rows += [row(name, length=128, backend="reference") for name in "ab"]
    rows += [row("none", length=length, backend="sdpa") for length in (128, 512)]
    rows += [row("a, blocked", backend="blocked"), row("no positions", backend="")]
    assert attention.backends_used([*rows, *rows]) == (
        " Evaluated by `native`, `reference` (a, b at 128), `sdpa` (none at 128, 512)."
    )
    assert attention.backends_used([row("a")]) == ""


def test_an_interrupted_run_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The same command alone would begin again, and write over the rows."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "measure", interrupt)
    assert relpos(*"benchmark attention --lengths 8 --schemes none".split()) == 130
    assert "--csv FILE: add --resume" in capsys.readouterr().err
