"""Metrics that fairseq lacks, checked case by case against the official scripts' definitions."""
