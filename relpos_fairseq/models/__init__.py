"""Models that fairseq registers: each file registers its named sizes when imported."""
