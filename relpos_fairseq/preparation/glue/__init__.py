"""GLUE and XNLI: their files, their metrics, and the published fine-tuning protocols."""
