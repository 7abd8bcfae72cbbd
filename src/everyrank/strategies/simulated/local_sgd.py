"""Simulation of local SGD in one process: each replica in turn is loaded into the model for its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.data import Batch
from everyrank.layout import Layout
from everyrank.layout.options import LocalSGDOptions
from everyrank.parallel.local_sgd import averaged_state, check_same_state, state_names
from everyrank.parallel.mesh import open_mesh
from everyrank.parallel.parallelize import parallelize
from everyrank.parallel.trainable import Trainable, make_trainable
from everyrank.strategies import Prepared
from everyrank.strategies.local_sgd import check_trains_alone, local_update
from everyrank.strategies.simulated.ranks import batches_of_ranks, in_one_process, rank_gradients
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["simulate"]


class _Replicas:
    """Snapshots of the replicas, and the loss terms each has seen since the last average."""

    def __init__(self, trainable: Trainable, count: int) -> None:
        self.trainable, self.count = trainable, count
        self.snapshots: list[dict[str, Any]] = []
        self.terms: list[float] = []
        self.num_updates = 0

    def reset(self) -> None:
        """Set all replicas to the current model."""
        self.snapshots = [self.trainable.snapshot() for _ in range(self.count)]
        self.terms, self.num_updates = [0.0] * self.count, 0

    @torch.no_grad()
    def load_mean(self, has_state: bool) -> None:
        """Load the mean of all replicas, each weighted by its terms, into the model.

        `has_state`: also that of the optimizer's state. Raises `WorkloadError` for replicas with different state.
        """
        trainable, sums = self.trainable, list[Tensor]()
        optimizer = trainable.optimizer if has_state else None
        names: dict[int, list[str]] = {}
        for rank, (snapshot, weight) in enumerate(zip(self.snapshots, self.terms, strict=True)):
            trainable.load_snapshot(snapshot)
            if has_state:
                names[rank] = state_names(trainable.model, trainable.optimizer)
                check_same_state(names)
            state = averaged_state(trainable.model, optimizer)
            parts = [tensor * (weight / sum(self.terms)) for tensor in state]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        trainable.load_snapshot(self.snapshots[0])  # with the state that is not averaged
        for tensor, mean in zip(averaged_state(trainable.model, optimizer), sums, strict=True):
            tensor.copy_(mean)


def simulate(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Simulate the replicas of `layout.simulated` ranks, one after the other in each update."""
    check_trains_alone(workload, layout, layout.simulated)
    parallel = parallelize(workload, layout, open_mesh(layout, world), local_statistics=True)
    trainable = make_trainable(workload, layout, parallel.model)
    replicas = _Replicas(trainable, layout.simulated)
    replicas.reset()
    trainable.on_restore.append(replicas.reset)

    def step(batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=world.device)
        for rank, batches_of_rank in enumerate(batches_of_ranks(batches, layout)):
            trainable.load_snapshot(replicas.snapshots[rank])
            _, share = rank_gradients(parallel, trainable, batches_of_rank, moves_statistics=True)
            local_update(trainable, share, batches_of_rank)
            replicas.snapshots[rank] = trainable.snapshot()
            replicas.terms[rank] += float(share[1])
            total += share
        replicas.num_updates += 1
        is_average = replicas.num_updates == layout.read(LocalSGDOptions).every
        replicas.load_mean(has_state=is_average)  # for evaluation, and as the start of all replicas after an average
        if is_average:
            replicas.reset()
        return total

    return in_one_process(parallel, trainable, step)
