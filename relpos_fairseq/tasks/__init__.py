"""Tasks of fairseq."""
