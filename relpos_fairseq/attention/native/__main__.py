"""Compile the kernel in C before it is needed: python -m relpos_fairseq.attention.native."""

import logging
import sys

from relpos_fairseq.attention.native import build


def main() -> int:
    """Compile, and return exit status 0; or print what is missing, and return 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    problem = build.problem()
    if problem is not None:
        print(f"error: attention backend native cannot evaluate {problem}", file=sys.stderr)
    return 0 if problem is None else 2


if __name__ == "__main__":
    sys.exit(main())
