"""What a scheme is, and how a model has one, in the order in which they build on each other.

positions -> relations -> terms, options -> scheme -> rotation, gates, plan -> placement -> config -> calls. Schemes
(`schemes/`) and the evaluation of their terms (`attention/`) stand beside it.
"""
