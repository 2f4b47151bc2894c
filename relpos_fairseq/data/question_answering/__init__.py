"""Extractive question answering: SQuAD's files, windows over long contexts, spans out of logits."""
