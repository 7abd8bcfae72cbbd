"""The training loop that `train`, `verify` and `bench` share: loads data, runs updates, evaluates.

open_data.py    the data of a workload, with a length that all ranks agree on
updates.py      runs the updates of a training in order
evaluation.py   exact sums over the evaluation data
finite.py       finds the first tensor that is NaN or infinite
"""

from everyrank.loop.evaluation import evaluate, mean_metrics
from everyrank.loop.open_data import open_data, wrap_user_errors
from everyrank.loop.updates import run_updates

__all__ = ["evaluate", "mean_metrics", "open_data", "run_updates", "wrap_user_errors"]
