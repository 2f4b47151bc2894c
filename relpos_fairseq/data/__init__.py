"""Data sets: streams of text, and questions with long contexts."""
