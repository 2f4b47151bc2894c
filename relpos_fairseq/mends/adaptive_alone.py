"""adaptive_loss refuses torch's DDP, which is the default, where one process needs none."""

import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss


def let_one_process_use_adaptive_loss() -> None:
    """Refuse `--ddp-backend` only where several processes train: a band without a token then."""
    refusing = AdaptiveLoss.build_criterion.__func__

    def build_criterion(cls, cfg, task):
        if not torch.distributed.is_initialized():
            return cls(task, cfg.sentence_avg)
        return refusing(cls, cfg, task)

    AdaptiveLoss.build_criterion = classmethod(build_criterion)
