"""Every published scheme: one paper, one file.  Importing this package registers them all.

The order is that of the contract table.
"""

# isort: off
from relpos_fairseq.schemes import absolute as absolute
from relpos_fairseq.schemes import shaw as shaw
from relpos_fairseq.schemes import transformer_xl as transformer_xl
from relpos_fairseq.schemes import t5 as t5
from relpos_fairseq.schemes import huang as huang
from relpos_fairseq.schemes import m4m as m4m
from relpos_fairseq.schemes import deberta as deberta
from relpos_fairseq.schemes import tupe as tupe
from relpos_fairseq.schemes import chen as chen
from relpos_fairseq.schemes import rope as rope
from relpos_fairseq.schemes import alibi as alibi
from relpos_fairseq.schemes import kerple as kerple
