"""Every command prints a screen of warnings about fairseq's own use of hydra and torch."""

import warnings

TEXTS = (
    r"\s*'config' is validated against ConfigStore schema",
    r"In 'config': Usage of deprecated keyword in package header",
    r"'pin_memory' argument is set as true but no accelerator",
    r"Support for mismatched key_padding_mask and attn_mask",
    r"The given NumPy array is not writable",
)


def quiet_warnings() -> None:
    """Silence warnings that no user can act upon."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra(\..*)?$")
    for text in TEXTS:
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", message=r"`torch\.cuda\.amp\.", category=FutureWarning)
