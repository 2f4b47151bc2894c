"""fairseq asks rank 0 alone for a task's state, where other ranks' state would be lost."""

from fairseq import checkpoint_utils

from relpos_fairseq.mends.replacing import replaces


def gather_task_state() -> None:
    """Let a task with `gather_checkpoint_state` collect every rank's state before a save."""

    @replaces(checkpoint_utils, "save_checkpoint")
    def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
        if hasattr(trainer.task, "gather_checkpoint_state") and not cfg.no_save:
            world_size = trainer.data_parallel_world_size
            group = trainer.data_parallel_process_group if world_size > 1 else None
            trainer.task.gather_checkpoint_state(group, trainer.data_parallel_rank, world_size)
        return original(cfg, trainer, epoch_itr, val_loss)
