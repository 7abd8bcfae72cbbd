"""Learning-rate schedules of the built-in workloads, from torch's own schedulers. All step once per update."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from everyrank.errors import WorkloadError

__all__ = ["MILESTONES", "SCHEDULES", "make_lr_schedule"]

SCHEDULES = ("constant", "step", "multistep", "cosine", "linear")


MILESTONES = (1 / 3, 2 / 3, 8 / 9)
"""Of `multistep`, as parts of the training: epochs 30, 60 and 80 of 90."""


def make_lr_schedule(
    kind: str, updates: int, warmup: int = 0, milestones: tuple[float, ...] = MILESTONES
) -> Callable[[Optimizer], LRScheduler]:
    """A schedule over `updates` updates, the first `warmup` of which raise the rate linearly.

    kind         constant; step: a tenth after every third of the training; multistep: a tenth after each of the
                 milestones; cosine, linear: down to nothing at the end
    milestones   parts of the whole: by default those of epochs 30, 60 and 80 of 90

    Raises `WorkloadError` for another kind, or a warm-up that leaves nothing.
    """
    if kind not in SCHEDULES:
        raise WorkloadError(f"--set schedule={kind}: give one of {', '.join(SCHEDULES)}")
    if not all(0 < milestone < 1 for milestone in milestones):
        raise WorkloadError(f"milestones at {milestones} of the training: each has to be inside it")
    if not 0 <= warmup < updates:
        raise WorkloadError(f"a warm-up of {warmup} updates in a training of {updates}: give a shorter one")

    def schedule(optimizer: Optimizer) -> LRScheduler:
        left = updates - warmup
        if kind in ("step", "multistep"):
            parts = milestones if kind == "multistep" else (1 / 3, 2 / 3)
            places = sorted(
                max(1, round(milestone * updates) - warmup) for milestone in parts
            )  # two at one place count twice
            after: LRScheduler = MultiStepLR(optimizer, places, gamma=0.1)
        elif kind == "linear":
            after = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=left)
        elif kind == "cosine":
            after = CosineAnnealingLR(optimizer, left)
        else:
            after = ConstantLR(optimizer, factor=1.0, total_iters=1)
        if not warmup:
            return after
        before = LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(1, warmup - 1))
        return SequentialLR(optimizer, [before, after], milestones=[warmup])

    return schedule
