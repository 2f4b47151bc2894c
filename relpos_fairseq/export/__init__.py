"""Export trained models to other libraries' own formats; no file here knows a scheme by name."""
