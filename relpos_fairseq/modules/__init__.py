"""Modules that fairseq's layers are built from."""
