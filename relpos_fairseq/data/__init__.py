"""Data that the package can make by itself."""
