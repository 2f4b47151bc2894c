"""The parts of `relpos_transformer_xl`."""
