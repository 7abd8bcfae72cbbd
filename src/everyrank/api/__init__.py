"""What a person's own process does: start the ranks, wait, hand back Records. Imports no torch.

calls.py     run, verify, bench and predict
scaling.py   bench on several numbers of ranks
"""

from everyrank.api.calls import bench, check_fewer_ranks, predict, run, verify
from everyrank.api.scaling import bench_scaling

__all__ = ["bench", "bench_scaling", "check_fewer_ranks", "predict", "run", "verify"]
