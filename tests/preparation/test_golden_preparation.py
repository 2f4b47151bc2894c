"""Each preparation writes the bytes that version 7983f42 wrote, but for characters in dictionaries of `wmt`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.commands import relpos_job
from helpers.golden_preparation import RUNS, run_all, words_of

ADDED = {
    "glue": {"tokenizer.json"},
    "wmt-subword-nmt": {"dict.txt"},
    "wmt-sentencepiece": {"dict.txt"},
}  # names of files that later versions write as well
GOLDEN = json.loads(Path(__file__).with_name("golden_preparation.json").read_text())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, dict[str, dict]]:
    return run_all(tmp_path_factory.mktemp("golden"), lambda *of: relpos_job(*words_of(*of)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_text_gives_the_same_bytes(prepared, name):
    files = {
        path: digest for path, digest in prepared[name]["files"].items() if Path(path).name not in ADDED.get(name, ())
    }
    assert files.keys() == GOLDEN[name]["files"].keys()
    assert files == GOLDEN[name]["files"]
    assert prepared[name]["counts"] == GOLDEN[name]["counts"]
