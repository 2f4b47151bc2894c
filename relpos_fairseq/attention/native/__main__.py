"""Compile the kernel before it is needed: python -m relpos_fairseq.attention.native."""

import logging
import sys

from relpos_fairseq.attention.native import build


def main() -> int:
    """Status 0, or 2 with one line that says what is missing."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    problem = build.problem()
    if problem is not None:
        print(f"error: attention backend native cannot evaluate {problem}", file=sys.stderr)
    return 0 if problem is None else 2


if __name__ == "__main__":
    sys.exit(main())
