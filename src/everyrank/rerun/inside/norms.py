"""Batch norm on one rank that normalises the samples of each recorded rank separately, as on these ranks."""

# torch names its base class _BatchNorm.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from everyrank.audit.watch.sync_batch_norm import install_sync_batch_norm
from everyrank.rerun.inside.session import Session

__all__ = ["install_norms"]


def install_norms(session: Session) -> None:
    """Let BatchNorm normalise each rank's part of a merged batch separately. SyncBatchNorm uses the whole batch."""
    if session.settings["norms_over_ranks"] and session.ranks > 1:
        _install_norms_over_ranks()
    if not session.imposed or len(session.imposed) < 2:
        return
    plain: Any = _BatchNorm.forward

    def forward(self: Any, input: Any) -> Any:  # noqa: A002  (torch's name)
        values, rows = input, session.rows
        if isinstance(self, SyncBatchNorm) or not (self.training and rows and len(values) % sum(rows) == 0):
            return plain(self, values)
        scale = len(values) // sum(rows)
        values_by_rank = values.split([count * scale for count in rows])
        outputs = [plain(self, values_by_rank[0])]
        # rank 0's running statistics are those that DDP broadcasts and a script saves
        rank_0_buffers = dict(self._buffers)
        try:
            for rank_values in values_by_rank[1:]:
                self._buffers.update(
                    {name: None if each is None else each.clone() for name, each in rank_0_buffers.items()}
                )
                outputs.append(plain(self, rank_values))
        finally:
            self._buffers.update(rank_0_buffers)
        session.facts["norms"] = session.facts.get("norms", 0) + 1
        return torch.cat(outputs)

    kind: Any = _BatchNorm
    kind.forward = forward


def _install_norms_over_ranks() -> None:
    """Let BatchNorm take the samples of all ranks, as SyncBatchNorm does on GPUs."""
    install_sync_batch_norm()
    kind: Any = _BatchNorm
    plain, over_ranks = kind.forward, SyncBatchNorm.forward

    def forward(self: Any, input: Any) -> Any:  # noqa: A002  (torch's name)
        if not (self.training and dist.is_initialized()):
            return plain(self, input)
        self.process_group = None
        return over_ranks(self, input)

    kind.forward = forward
