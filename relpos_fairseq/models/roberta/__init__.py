"""The parts of `relpos_roberta`."""
