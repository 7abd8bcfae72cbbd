"""Change the global batch of a workload, with a rule for the learning rate."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from everyrank.errors import UsageError
from everyrank.workload.workload import Workload

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["LR_RULES", "with_batch"]

LR_RULES = ("none", "linear", "sqrt")
"""linear: Goyal et al. 2017, for SGD; sqrt: Krizhevsky 2014, and Malladi et al. 2022 for Adam."""


def with_batch(workload: Workload, old_batch: int, batch: int, rule: str) -> Workload:
    """Return the workload with global batch `batch` instead of `old_batch`, learning rates scaled by the rule.

    Raises `UsageError` for an unknown rule.
    """
    if rule not in LR_RULES:
        raise UsageError(f"--lr-rule {rule}: give one of {', '.join(LR_RULES)}")
    factor = {"none": 1.0, "linear": batch / old_batch, "sqrt": math.sqrt(batch / old_batch)}[rule]

    def optimizer(model: nn.Module) -> Optimizer:
        unscaled = workload.optimizer(model)
        for group in unscaled.param_groups:  # before the schedule is built, which starts from these learning rates
            group["lr"] = group["lr"] * factor
        return unscaled

    change = "unchanged (--lr-rule linear or sqrt would scale it)" if rule == "none" else f"x {factor:g} ({rule} rule)"
    return dataclasses.replace(
        workload,
        global_batch=batch,
        optimizer=optimizer if factor != 1.0 else workload.optimizer,
        batch_rule=f"global batch {old_batch} -> {batch}: learning rate {change}",
    )
