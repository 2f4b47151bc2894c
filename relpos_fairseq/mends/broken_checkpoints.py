"""A broken checkpoint ends in an error that does not name it, a malicious one in bad advice."""

from fairseq import checkpoint_utils

from relpos_fairseq.engine.errors import unreadable
from relpos_fairseq.mends.replacing import replaces


def explain_broken_checkpoints() -> None:
    """Say in one line which file it is, and what to do."""

    @replaces(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(original, path, *args, **kwargs):
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, ValueError, MemoryError):
            raise
        except Exception as error:
            raise ValueError(unreadable(path, error)) from None
