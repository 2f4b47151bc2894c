"""The flat configs of the models: the same fields on the command line and in hydra."""
