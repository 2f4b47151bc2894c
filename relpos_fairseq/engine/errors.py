"""The one error of bad input."""


class PreparationError(ValueError):
    """Data cannot be prepared; the message names the input, the value and the remedy."""
