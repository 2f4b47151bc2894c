"""Parallel text for translation: sources, cleaning, tokens, units, fairseq's binary form."""
