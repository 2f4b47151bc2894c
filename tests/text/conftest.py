"""What the tests of text share."""

from inference.conftest import prepare_wmt  # noqa: F401
