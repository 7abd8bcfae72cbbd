"""Messages: from rank 0 to rank 1, or from each rank to the next one."""

from __future__ import annotations

import torch.distributed as dist

from everyrank.collectives.operations.case import Call, Case, writing_call

__all__ = ["make_batch_exchange", "make_exchange", "make_send"]


def make_send(case: Case) -> Call:
    """Send from rank 0 to rank 1, which receives from any rank, on CUDA from rank 0; blocking."""
    tensor = case.empty()
    source = 0 if case.device.type == "cuda" else None  # nccl only receives from a given rank

    def start(_: bool) -> None:
        if case.rank == 0:
            dist.send(tensor, group=case.group, group_dst=1, tag=7)
        elif case.rank == 1:
            dist.recv(tensor, group=case.group, group_src=source, tag=7)

    initial = case.values(0) if case.rank == 0 else case.empty()
    return writing_call(case, start, tensor, initial, case.values(0) if case.rank == 1 else None)


def make_exchange(case: Case) -> Call:
    """Send to the next rank and receive from the previous one, at the same time."""
    received, sent = case.empty(), case.values(case.rank)
    to, source = (case.rank + 1) % case.size, (case.rank - 1) % case.size

    def start(_: bool) -> None:
        works = [
            dist.isend(sent, group=case.group, group_dst=to, tag=3),
            dist.irecv(received, group=case.group, group_src=source, tag=3),
        ]
        for work in works:
            if work is not None:
                work.wait()

    return writing_call(case, start, received, case.empty(), case.values(source))


def make_batch_exchange(case: Case) -> Call:
    """Send to the next rank and receive from the previous one, with batch_isend_irecv."""
    received, sent = case.empty(), case.values(case.rank)
    to, source = (case.rank + 1) % case.size, (case.rank - 1) % case.size

    def start(_: bool) -> None:
        batch = [
            dist.P2POp(dist.isend, sent, group=case.group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=case.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    return writing_call(case, start, received, case.empty(), case.values(source))
