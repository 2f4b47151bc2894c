"""What people's files are read by: one line for whatever is wrong with them."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import pytest
from fairseq.data import Dictionary
from hypothesis import given
from hypothesis import strategies as st

from helpers import ROOT
from relpos_fairseq.formats.pickles import safe_unpickle
from relpos_fairseq.io.command import run_command
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import sha256_of
from relpos_fairseq.io.reading import (
    Amount,
    Count,
    Number,
    of_type,
    read_json,
    read_json_lines,
    read_text,
    read_yaml,
    reading,
)
from relpos_fairseq.io.stages import ResumeLog
from relpos_fairseq.io.tensor_files import read_checkpoint
from relpos_fairseq.text import provenance
from relpos_fairseq.text.dictionary import read_dictionary


class Named(TypedDict):
    """A record."""

    name: str


class Row(Named, total=False):
    """A record with a key that may be absent."""

    score: float | None


@pytest.mark.parametrize(
    ("content", "wanted", "said"),
    [
        (b"{", object, "line 1 column 2"),
        (b"", object, "line 1 column 1"),
        (b"\xff", object, "no UTF-8 at byte 0"),
        (b"[" * 100_000, object, "nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', object, "'c' is named twice"),
        (b'"\\ud800"', object, r"\\ud800 is half of a character"),
        (b"9" * 5000, object, "4300 digits"),
        (b"[1, true]", list[int], "1 is true, and must be a whole number"),
        (b'{"a": [1, "2"]}', dict[str, list[float]], 'a/1 is "2", and must be a number'),
        (b"[1e999]", list[float], "0 is Infinity, and must be a number"),
        (b"{}", Row, "name is missing, and must be there"),
        (b'{"name": "a", "score": "b"}', Row, 'score is "b", and must be a number or null'),
        (b'["a", 1]', tuple[str, str], "1 is 1, and must be a text"),
        (b'["a"]', tuple[str, str], "must be a list of 2"),
        (b"[]", dict[str, int] | str, r"the whole is \[\], and must be an object or a text"),
        (b'"c"', Literal["a", "b"], "must be one of a, b"),
        (b"-1", Count, "must be a whole number from 0"),
        (b'{"a": -0.5}', dict[str, Amount | None], "a is -0.5, and must be a number from 0 or null"),
        (b'{"name": 3, "of": "a"}', Annotated[dict[str, object], Named], "name is 3, and must be a text"),
        (b'{"c": 1}', dict[Literal["a", "b"], int], '"c", and must be one of a, b as a key'),
    ],
)
def test_wrong_json_is_one_line(tmp_path: Path, content: bytes, wanted: Any, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} is not .*{said}.*: copy it again or give another$"):
        read_json(path, wanted)


def test_right_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"name": "\\ud83d\\ude00", "score": 1, "more": null}')
    assert read_json(path, Row) == {"name": "\U0001f600", "score": 1, "more": None}
    assert read_json(tmp_path / "none", default=None) is None
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    path.write_text('{"loss": NaN, "updates": 1}', encoding="utf-8")
    assert read_json(path, dict[str, Number])["updates"] == 1
    path.write_text('[1]\n\n{"a": "\u2028"}\n', encoding="utf-8")
    assert read_json_lines(path) == [[1], {"a": "\u2028"}]
    path.write_text("[1]\n[2\n", encoding="utf-8")
    with pytest.raises(UserError, match="a.json is not lines of JSON .line 2: "):
        read_json_lines(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1\nb: 2\na: 3", "'a' is named twice"),
        ("a: [", "expected the node content"),
        ("[" * 20_000, "nested too deeply"),
        ("? [1]\n: 2", "unhashable"),
        ("a: &a [*a]", "an alias holds itself"),
        ("a0: &a0 [1]\n" + "\n".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * 9}]" for n in range(9)), "its aliases make"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a\x01b", "special characters are not allowed"),
        ("[1, 2]", "must be an object"),
        ("a: 2024-99-01", "month must be in"),
    ],
)
def test_wrong_yaml_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=f"^{path} is not .*{said}"):
        read_yaml(path, dict[str, object])


def test_right_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base {a: 1, b: 2}\none: {<<: *base, a: 3}\n", encoding="utf-8")
    assert read_yaml(path, dict[str, dict[str, int]])["one"] == {"a": 3, "b": 2}


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-04", "1.0e-4", ".1e-3", "1.e-4", "0.0001", "1_0.0e-5"])
def test_one_number_is_one_value_however_it_is_written(tmp_path: Path, text: str):
    path = tmp_path / "spec.yaml"
    path.write_text(f"lr: {text}\nname: 1e\nhash: 12e4ab\ncommit: 12e45678\ntext: '1e-4'\n")
    assert read_yaml(path) == {"lr": 1e-4, "name": "1e", "hash": "12e4ab", "commit": "12e45678", "text": "1e-4"}


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyError("model"), RuntimeError("a\n  b"), MemoryError(), OSError("no gzip file")]
)
def test_whatever_a_reader_raises_is_one_line(capsys: pytest.CaptureFixture, error: BaseException) -> None:
    def main(argv: object) -> None:
        with reading("a.bin", "a table", "make it anew"):
            raise error

    assert run_command(main) == 2
    assert capsys.readouterr().err.startswith("error: a.bin is not a table (")


def test_what_is_no_fault_of_the_file_passes() -> None:
    for error in (KeyboardInterrupt(), ModuleNotFoundError("yaml"), FileNotFoundError(2, "No such file", "a.bin")):
        with pytest.raises(type(error)), reading("a.bin", "a table"):
            raise error
    with pytest.raises(UserError, match=r"^a.bin: twice$"), reading("a.bin", "a table"):
        raise UserError("twice")


READ_BY: list[Callable[[Path], object]] = [
    *(read_json, read_json_lines, read_yaml, read_text, read_dictionary, read_checkpoint, safe_unpickle, sha256_of),
    lambda path: provenance.of_files({"dict.txt": path})["dict.txt"],
    lambda path: Dictionary.load(str(path)),  # fairseq's
    lambda path: ResumeLog(path, {}),
]


@pytest.mark.parametrize("read", READ_BY)
def test_what_has_no_end_is_not_waited_for(tmp_path: Path, read: Callable) -> None:
    os.mkfifo(tmp_path / "dict.txt")
    for path in (tmp_path / "dict.txt", Path("/dev/zero")):
        with pytest.raises(UserError, match=f"{path} is a pipe, socket or device.*: give an ordinary file"):
            read(path)


def test_pipes_of_the_shell_are_read() -> None:
    for content in (b"[1]", b""):
        read, write = os.pipe()
        os.write(write, content)
        os.close(write)
        with os.fdopen(read):
            assert read_text(f"/dev/fd/{read}") == content.decode()
    assert read_text(os.devnull) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from([object, Row, list[Row], dict[str, list[int] | None], float | None, tuple[str, int]]))
def test_a_type_is_there_or_a_value_error(value: object, wanted: Any) -> None:
    try:
        assert of_type(value, wanted) is value
    except ValueError as error:
        assert "must be" in str(error) and "\n" not in str(error)
    assert of_type(value, object) is value and json.dumps(value)


# Readers of libraries for text; a call of one stands within `with reading(...)`, or reads no file.
READERS = {"json.load", "json.loads", "csv.reader", "csv.DictReader", "pd.read_csv", "json.JSONDecoder"}
READERS |= {"BPE", "SentencePieceProcessor", "from_file", "from_str", "FromString", "ParseFromString"}
NO_FILE = {
    "attention/triton/selftest_cache.py:_read": "our own cache, made anew if broken; attention/ imports no io/",
    "attention/triton/selftest_cache.py:run": "a line of our own child",
    "formats/closing_check.py:ask": "a line of our own child",
    "formats/closing_check.py:serve": "a line of our own parent",
    "export/transformers_folder.py:generating_config": "a value that was made here",
    "io/stages.py:as_json": "a value that was made here",
    "preparation/glue_tasks.py:_fields": "a line, whose caller names file and number",
    "text/folders.py:_read_byte_bpe": "an untrained model's own text",
    "text/folders.py:pairs": "within load_tokenizer, which reads a folder whole",
    "text/folders.py:_read_wordpiece": "an untrained model's own text",
    "text/sentencepiece_model.py:sentencepiece_state": "what `load_sentencepiece` has read",
    "text/tokenizer.py:_as_text": "the content that `load_tokenizer` reads within `reading`, or that was made here",
    "text/tokenizer.py:content": "its own copy of what was read",
    "text/tokenizer.py:continues_after_mask": "a value that was made here",
    "text/tokenizer.py:json_of": "a model's own text",
    "text/training.py:_of_library": "a model's own text",
    "text/transformers_files.py:transformers_files": "a value that was made here",
}


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package."""
    package = ROOT / "relpos_fairseq"
    for path in package.rglob("*.py"):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def readers_of(node: ast.AST, function: str = "") -> set[str]:
    """The functions that call a library's reader outside of `with reading(...)`."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.With | ast.AsyncWith):
        entered = [getattr(item.context_expr, "func", None) for item in node.items]
        if any(isinstance(called, ast.Name) and called.id == "reading" for called in entered):
            return set()
    found = set().union(*(readers_of(child, function) for child in ast.iter_child_nodes(node)))
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in READERS or name.split(".")[-1] in READERS - {"BPE"} or name.startswith("yaml."):
            found.add(function)
    return found


def test_no_library_reads_a_file_outside_of_the_boundary() -> None:
    found = {
        f"{path}:{function}" for path, tree in parsed() if path != "io/reading.py" for function in readers_of(tree)
    }
    assert found == NO_FILE.keys()


def test_readers_have_no_other_name() -> None:
    """No import by which the test above would not see a reader."""
    modules = ("json", "csv", "yaml")
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in modules, f"{path}: import {node.module} whole"
            if isinstance(node, ast.Import | ast.ImportFrom):
                renamed = {one.name for one in node.names if one.asname}
                assert not any(name.split(".")[0] in modules or name in READERS for name in renamed), path
