"""fairseq's trainer hides why a checkpoint does not fit: "ensure that the architectures match"."""

from fairseq.trainer import Trainer

from relpos_fairseq.mends.replacing import replaces
from relpos_fairseq.scheme import PositionMismatchError


def name_position_mismatch() -> None:
    """Let the trainer say which positions disagree."""

    @replaces(Trainer, "load_checkpoint")
    def load_checkpoint(original, self, filename, *args, **kwargs):
        try:
            return original(self, filename, *args, **kwargs)
        except Exception as error:
            if isinstance(error.__context__, PositionMismatchError):
                raise PositionMismatchError(f"{filename}: {error.__context__}") from None
            raise
