"""What the tests of inference share."""

import pytest

from helpers.folders import prepare


@pytest.fixture(scope="package")
def prepare_wmt():
    """A function that runs `relpos prepare wmt en-de` on a folder's text, in this process."""

    def run(raw, out, *more) -> None:
        options = ["--vocab-size", "60", "--workers", "1", *more]
        prepare("wmt", ["en-de", "--from-dir", raw, "--out", out, *options])

    return run
