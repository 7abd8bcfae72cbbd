"""Learning rates of the built-in workloads, made of torch's own schedulers. All step once per update."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from everyrank.errors import WorkloadError

__all__ = ["SCHEDULES", "make_schedule"]

SCHEDULES = ("constant", "step", "cosine")


def make_schedule(
    kind: str, updates: int, warmup: int = 0, milestones: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)
) -> Callable[[Optimizer], LRScheduler]:
    """A schedule over `updates` updates, the first `warmup` of which raise the rate linearly.

    kind   constant; step: a tenth after each of the `milestones` (parts of the whole: epochs 30, 60 and 80 of 90);
           cosine: down to nothing at the end

    Raises `WorkloadError` for another kind, or a warm-up that leaves nothing.
    """
    if kind not in SCHEDULES:
        raise WorkloadError(f"--set schedule={kind}: give one of {', '.join(SCHEDULES)}")
    if not 0 <= warmup < updates:
        raise WorkloadError(f"a warm-up of {warmup} updates in a training of {updates}: give a shorter one")

    def schedule(optimizer: Optimizer) -> LRScheduler:
        left = updates - warmup
        if kind == "step":
            places = sorted({max(1, round(part * updates) - warmup) for part in milestones})
            after: LRScheduler = MultiStepLR(optimizer, places, gamma=0.1)
        elif kind == "cosine":
            after = CosineAnnealingLR(optimizer, left)
        else:
            after = ConstantLR(optimizer, factor=1.0, total_iters=1)
        if not warmup:
            return after
        before = LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(1, warmup - 1))
        return SequentialLR(optimizer, [before, after], milestones=[warmup])

    return schedule
