"""A parser whose errors are one line."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong without repeating its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")
