"""A truncated or foreign checkpoint ends in an unpickling error that does not name the file."""

import os

from fairseq import checkpoint_utils

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
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ValueError(
                f"checkpoint {path} ({size:,} bytes) is truncated, or not a fairseq checkpoint: "
                f"copy it again or give another ({type(error).__name__}: {reason})"
            ) from error
