"""What was trained is used: raw text in, raw text out.  Only `checkpoints/` needs fairseq."""
