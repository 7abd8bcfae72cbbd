"""Exact sums over the evaluation data: every sample counts once, under every layout."""

from __future__ import annotations

from typing import Any

import torch

from everyrank.data import batches_for_evaluation
from everyrank.loop.open_data import wrap_user_errors
from everyrank.parallel.loss import evaluate_batch
from everyrank.strategies import Prepared
from everyrank.workload import Workload
from everyrank.world.collectives import sum_over_ranks

__all__ = ["evaluate", "mean_metrics"]


def evaluate(prepared: Prepared, dataset: Any) -> dict[str, tuple[float, float]]:
    """Return the exact (sum, count) of the loss and each metric over all ranks and samples. A collective."""
    workload = prepared.workload
    shares = torch.zeros(1 + len(workload.metrics), 2, dtype=torch.float64)
    prepared.gather_for_eval()
    prepared.model.eval()
    with torch.no_grad(), prepared.averaged_weights():
        batches = batches_for_evaluation(workload, dataset, prepared.data_slice, prepared.world, prepared.dtype)
        for batch in batches:
            output = prepared.predict(batch)
            if prepared.has_output:
                shares += evaluate_batch(workload, output, batch, prepared.mesh)
    prepared.model.train()
    total = sum_over_ranks(shares, prepared.world)
    names = ["loss", *workload.metrics]
    return {name: (float(total[row, 0]), float(total[row, 1])) for row, name in enumerate(names)}


def mean_metrics(workload: Workload, metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each sum and the workload's derived metrics; the mean loss is called eval_loss.

    Names with a leading underscore are inputs of `derived` only, and are left out.
    """
    means = {name: total / count for name, (total, count) in metrics.items() if count}
    named = {("eval_loss" if name == "loss" else name): value for name, value in means.items()}
    with wrap_user_errors():
        metrics_by_name = named | {name: float(derive(named)) for name, derive in workload.derived.items()}
    return {name: value for name, value in metrics_by_name.items() if not name.startswith("_")}
