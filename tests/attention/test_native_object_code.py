"""What compilers make of the kernel: packed exponentials, products that stay in registers.

The object code of each instruction set is read; nothing of it runs.  A loop over lanes that gcc
turns into single numbers, or a block whose sums do not fit the registers, costs half the speed and
no test of numbers sees it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from relpos_fairseq.attention.native import build

X86 = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
ARM = ("neoverse-n1", "neoverse-v1")
# What multiplies, adds or subtracts vectors, and what does single numbers.
PACKED = {"x86": r"v?(mul|add|sub|fn?m(add|sub)\d+)p[sd]", "arm": r"f(mul|mla|mls|add|sub)"}
SINGLE = {"x86": r"v?(mul|add|sub|fn?m(add|sub)\d+)s[sd]", "arm": r"f(mul|madd|msub|add|sub)"}
INTEGERS = r"vpdpbusd|vpmaddubsw"  # products of four pairs, which are summed
STACK = {"x86": r"\(%[re]?(sp|bp)\)", "arm": r"\[(sp|x29)"}
VECTORS = {"x86": r"%[xyz]mm\d", "arm": r"\b[qvdz]\d"}
EXPONENTIAL = """
#include "rowwise.h"
void exponentials_of(real *x, int64_t count, real top)
{
    for (int64_t j = 0; j < count; j += NR)
        exponential((vec *)(x + j), top);
}
"""
Code = list[tuple[int, str, str]]  # address, mnemonic, operands


def tools(target: str) -> tuple[str, str]:
    """The compiler and objdump for a target, or skip."""
    is_arm, machine = target in ARM, build.platform.machine().lower()
    at_home = machine in (("aarch64", "arm64") if is_arm else ("x86_64", "amd64"))
    prefix = "" if at_home else "aarch64-linux-gnu-" if is_arm else "x86_64-linux-gnu-"
    found = [shutil.which(prefix + name) for name in ("gcc", "objdump")]
    if None in found:
        pytest.skip(f"{prefix}gcc or {prefix}objdump is not installed")
    return found[0], found[1]


def functions(target: str, source: Path, folder: Path, double: bool) -> dict[str, Code]:
    """The functions of a source, compiled with the flags that users' kernels have."""
    compiler, objdump = tools(target)
    kind = "-mcpu=" if target in ARM else "-march="
    flags = [*build.flags_for("aarch64" if target in ARM else "x86_64", kind + target)[0]]
    flags = [flag for flag in flags if flag != "-shared"]
    defined = ["-DRELPOS_DOUBLE"] * double
    out = str(folder / "object.o")
    command = [compiler, *flags, *defined, f"-I{build.SOURCES}", "-c", str(source), "-o", out]
    subprocess.run(command, check=True)
    told = [objdump, "-d", "--no-show-raw-insn", out]
    text = subprocess.run(told, check=True, capture_output=True, text=True).stdout
    found: dict[str, Code] = {}
    for line in text.splitlines():
        if start := re.match(r"[0-9a-f]+ <([\w.]+)>:", line):
            code = found.setdefault(start[1], [])
        elif one := re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line):
            code.append((int(one[1], 16), one[2], one[3]))
    return found


def loops(code: Code, wanted: Callable[[Code], bool] = bool) -> list[Code]:
    """What stands between a jump backwards and its target, where it is wanted; of nested ones the innermost alone."""
    spans = []
    for address, name, operands in code:
        to = re.search(r"\b([0-9a-f]+) <", operands)
        if to and re.match(r"j|b\.|cbn?z|tbn?z|b$", name) and int(to[1], 16) <= address:
            spans.append((int(to[1], 16), address))
    parts = {span: [part for part in code if span[0] <= part[0] <= span[1]] for span in spans}
    found = [span for span, part in parts.items() if wanted(part)]
    return [parts[s] for s in found if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in found)]


def count(code: Code, pattern: str, kind: str) -> int:
    """Instructions of a pattern that handle vectors (ARM's names do not say)."""
    named = [operands for _, name, operands in code if re.fullmatch(pattern, name)]
    if kind == "arm":
        vector = pattern == PACKED["arm"]
        named = [text for text in named if bool(re.search(r"\b[vz]\d+\.", text)) == vector]
    return len(named)


def spilled(codes: list[Code], kind: str) -> list[str]:
    """Instructions that write or read vectors on the stack."""
    found = [part for part in sum(codes, []) if re.search(STACK[kind], part[2]) and re.search(VECTORS[kind], part[2])]
    return [" ".join(part[1:]) for part in found]


@pytest.mark.parametrize("double", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("target", [*X86, *ARM])
def test_exponentials_are_packed(target: str, double: bool, tmp_path: Path) -> None:
    """The loop over vectors has their arithmetic, and that of single numbers nowhere."""
    source = tmp_path / "exponential.c"
    source.write_text(EXPONENTIAL, encoding="utf-8")
    kind = "arm" if target in ARM else "x86"
    code = functions(target, source, tmp_path, double)["exponentials_of"]
    (loop,) = loops(code)
    assert count(loop, PACKED[kind], kind) >= 20
    assert count(loop, SINGLE[kind], kind) == 0


@pytest.mark.parametrize("target", [*X86, *ARM])
def test_products_stay_in_registers(target: str, tmp_path: Path) -> None:
    """The loop over channels multiplies MR rows by two vectors and touches no stack, nor of a linear layer's parts."""
    kind = "arm" if target in ARM else "x86"
    source = tmp_path / "products.c"
    blocks = ["block_set", "block_add", "whole_block_sum", "whole_block_residual", "whole_block_positive"]
    kept = ", ".join(f"(void *){name}" for name in blocks)
    source.write_text(f'#include "layer.h"\nvoid *kept[] = {{{kept}}};\n', encoding="utf-8")
    found = functions(target, source, tmp_path, False)
    for name in blocks:
        of_channels = loops(found[name], lambda one: count(one, PACKED[kind], kind) >= 12)
        assert of_channels
        assert not spilled(of_channels, kind), f"{target}, {name}"


@pytest.mark.parametrize(("target", "least"), [("x86-64-v3", 8), ("x86-64-v4", 16), ("icelake-server", 24)])
def test_integers_stay_in_registers(target: str, least: int, tmp_path: Path) -> None:
    """The loops over fours of inputs sum integers of INTEGER_ROWS rows, or four, and touch no stack."""
    source = tmp_path / "integers.c"
    source.write_text('#include "layer.h"\nvoid *kept = (void *)integer_panel;\n', encoding="utf-8")
    code = functions(target, source, tmp_path, False)["integer_panel"]
    of_inputs = loops(code, lambda one: count(one, INTEGERS, "x86") > 0)
    assert max(count(one, INTEGERS, "x86") for one in of_inputs) == least
    assert not spilled(of_inputs, "x86")


@pytest.mark.parametrize("target", [*X86[1:], "znver3"])
def test_a_panel_is_read_once_a_channel(target: str, tmp_path: Path) -> None:
    """A product of rows and a table reads no operand from memory: gcc for Zen 3 read a panel anew for every row."""
    source = tmp_path / "rows.c"
    source.write_text('#include "step.h"\nvoid *kept = (void *)rows_by_panels;\n', encoding="utf-8")
    found = functions(target, source, tmp_path, False)["rows_by_panels"]
    products = [part for one in loops(found) for part in one if re.fullmatch(r"vfmadd\d+ps", part[1])]
    assert len(products) >= 8
    assert not [operands for _, _, operands in products if "(" in operands]
