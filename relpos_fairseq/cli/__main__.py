"""`python -m relpos_fairseq.cli` is `relpos`."""

import sys

from relpos_fairseq.cli.main import main

sys.exit(main())
