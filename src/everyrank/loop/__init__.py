"""The loop: feed a prepared strategy, keep its shares, evaluate. What `train`, `verify` and `bench` have in common.

open_data.py    the data of a workload, with a length that all ranks agree on
updates.py      the updates of a training, one after the other
evaluation.py   exact sums over the evaluation data
finite.py       what is no number: a loss, the first tensor to blame
"""

from everyrank.loop.evaluation import evaluate, mean_metrics
from everyrank.loop.open_data import open_data, wrap_user_errors
from everyrank.loop.updates import run_updates

__all__ = ["evaluate", "mean_metrics", "open_data", "run_updates", "wrap_user_errors"]
