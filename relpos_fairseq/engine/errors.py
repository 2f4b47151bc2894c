"""Errors that a command reports in one line."""


class PreparationError(ValueError):
    """Bad input; the message names the input, the value and the remedy."""


class ToolError(RuntimeError):
    """A program that was started failed; the message is its own error line and where its log is."""
