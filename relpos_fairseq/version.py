"""The version, in one place: setup.py reads this file without importing the package."""

__version__ = "1.0.0"
