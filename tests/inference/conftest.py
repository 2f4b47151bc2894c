"""What the tests of inference share."""

import pytest

from helpers.commands import call
from helpers.folders import prepare
from relpos_fairseq.preparation import wmt


@pytest.fixture(scope="package")
def prepare_wmt():
    """A function that runs `relpos prepare wmt en-de` on a folder's text, in this process."""

    def preprocess(arguments, workers) -> None:
        call("preprocess", *arguments)

    def run(raw, out, *more) -> None:
        options = ["--vocab-size", "60", "--workers", "1", *more]
        prepare("wmt", ["en-de", "--from-dir", raw, "--out", out, *options])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wmt, "preprocess", preprocess)
        yield run
