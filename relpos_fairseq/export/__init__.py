"""What was trained, in other libraries' own formats; no file here knows a scheme by name."""
