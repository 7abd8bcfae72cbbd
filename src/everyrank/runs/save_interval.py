"""How long to train between two checkpoints."""

from __future__ import annotations

import math

__all__ = ["optimal_interval_seconds"]


def optimal_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds between two checkpoints that lose the least time to saving and to failures.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22 (2006), equation 37; its first term is J. W. Young's (CACM 17, 1974).
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds
