"""Data sets: the built-in corpus, streams of text, and questions with long contexts."""
