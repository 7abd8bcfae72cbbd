"""Expert parallel: every rank holds other experts and reads other samples; tokens travel to the experts they chose.

             rank 0: experts 0, 1           rank 1: experts 2, 3
    tokens   a → 1   b → 2                  c → 0   d → 3
                       ╰────────╳───────────╯                       all-to-all, and the same way back
    compute  c in 0  a in 1                 b in 2  d in 3

Holds     its experts, their gradients and optimizer state; all else in full
Travels   per micro-batch and mixture: an all-to-all of one number for each expert; forward two all-to-alls of a row for
          each token and expert that it chose, to the expert and back; backward two of their gradients; all before the
          next layer can go on. Per update one all-reduce of the gradients of what is no expert's, in buckets,
          overlapped with backward; the count of loss terms rides in it as two more elements; with clip_norm one of the
          sum of squares. Before the first update the whole model is put together once, and compared
Use when  the experts of a mixture do not fit on one device, between links that are fast both ways
Exact     yes
Source    Shazeer et al. 2017; Lepikhin et al. 2021 (GShard); Gale et al. 2023 (no capacity)

Keys: those of ddp. `Workload.experts` says where the experts are; their number has to divide by the ranks. Replicas of
experts are ddp:expert=N, shards of them fsdp:expert=N. How gradients are scaled is in parallel/expert.py.
"""

from __future__ import annotations

from everyrank.layout import Layout
from everyrank.strategies import Prepared, ddp
from everyrank.workload import Workload
from everyrank.world import World

__all__ = ["prepare"]


def prepare(workload: Workload, layout: Layout, world: World) -> Prepared:
    """Give every rank of the world its part of the experts.

    To all else it is ddp on a mesh whose ranks all lie along the expert axis. What sends the tokens is in
    parallel/expert.py.
    """
    return ddp.prepare(workload, layout, world)
