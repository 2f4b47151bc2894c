"""`relpos prepare wmt` under the name of a script."""

import sys
from pathlib import Path

from relpos_fairseq.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare", "wmt", *sys.argv[1:]], program=Path(sys.argv[0]).name))
