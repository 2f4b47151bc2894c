"""Data: what the package makes by itself, and what it reads."""
