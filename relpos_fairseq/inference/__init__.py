"""Use trained models on raw text.  Only `checkpoints/` needs fairseq."""
