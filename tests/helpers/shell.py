"""Command lines of `relpos` in this process, as a user would type them."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from helpers.commands import relpos


class Shell:
    """Runs lines in a folder of their own; `<name>` in a line is what a fixture is: a checkpoint's path, or a folder's.

    What a line cannot say, such as a text with quotes, comes behind it, a word each.
    """

    def __init__(self, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture) -> None:
        self._request, self._capsys = request, capsys

    def words(self, line: str) -> list[str]:
        """The words of a line."""
        fixture = self._request.getfixturevalue
        return [re.sub(r"<(\w+)>", lambda name: str(fixture(name[1])), word) for word in shlex.split(line)]

    def _ended(self, line: str, more: tuple[object, ...]) -> tuple[int, str, str]:
        words = [*self.words(line), *more]
        self._capsys.readouterr()
        try:
            status = relpos(*words)
        except SystemExit as end:  # a parser's
            status = end.code
        return status, *self._capsys.readouterr()

    def __call__(self, line: str, *more: object) -> str:
        """Run a command that succeeds; what it prints."""
        status, out, error = self._ended(line, more)
        assert status == 0, error
        return out

    def objects(self, line: str, *more: object) -> list[dict]:
        """Run a command that prints lines of JSON."""
        return [json.loads(one) for one in self(line, *more).splitlines()]

    def refused(self, line: str, *more: object) -> str:
        """Run a command that takes no such input; the line that says so, the only one of its errors."""
        status, _, error = self._ended(line, more)
        assert status == 2 and "Traceback" not in error
        error = re.sub(r"(?m)^relpos [a-z ]+: \d.*\n", "", error)  # of a machine that is busy
        assert re.fullmatch(r"(relpos[a-z ]*: )?error: .*\n", error), error
        return error


def told(said: str) -> str:
    """The pattern of a text of which some, at each `...`, is left out."""
    return ".*".join(map(re.escape, said.split("...")))
