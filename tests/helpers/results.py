"""Results of comparisons' runs, of which a test says what matters to it."""

from __future__ import annotations


def measured(**values: object) -> dict:
    """A run's result, as it is written; what is not given is that of some run."""
    numbers = {"parameters": 1234, "tokens_per_second": 100, "seconds": 3.5, "processor_seconds": 3.0, "megabytes": 400}
    losses = {"validations": [{"updates": n, "valid_loss": 5 / n, "valid_ppl": 2.0} for n in (5, 10, 12)]}
    return numbers | losses | {"versions": {"numpy": "2"}, "data": "d" * 64, "unit": "tokens", "sets": {}} | values
