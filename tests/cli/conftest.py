"""Data that tests of several commands read."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.questions import make_data, make_file
from helpers.roberta import write_packed, write_pairs


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences for masked language models."""
    return write_packed(tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of sentences for classifiers."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, of which some have no answer; those of few.json all have one."""
    folder = make_data(tmp_path_factory.mktemp("qa") / "data", unanswerable=True)
    make_file(folder / "few.json", 5, 4)
    return folder
