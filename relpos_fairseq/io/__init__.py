"""Whole files, lines, downloads, stages and processes: README.md describes the modules. No torch, no fairseq here."""
