"""All collective operations: prints the values of each rank before and after, and checks each result.

Run: torchrun --standalone --nproc-per-node 3 collectives.py

Memory         a few numbers on every rank; there is no training
Communication  the values in each picture; the other recipes list the collectives that they use
Use when       you look for the right operation, or want to check what an operation does

Pitfalls:
- Every rank of the group has to call the same operation, in the same order, with the same shape and dtype. Otherwise
  the other ranks wait until the timeout. dist.monitored_barrier names the missing rank (gloo only).
- After reduce, only the destination rank has the sum. The tensors of other ranks are undefined.
- async_op=True returns a Work object. Do not use the tensors before its wait() has returned.
- broadcast_object_list and similar functions pickle objects. Unpickling can run any code, so use them only between
  ranks that you trust. They are slow, so send numbers as tensors.
- The last bits of a sum depend on the order of additions, and so on the number of ranks and the backend. All ranks get
  the same bits.
"""

import os
import sys
import time
from datetime import timedelta
from functools import reduce
from operator import and_, or_, xor
from pathlib import Path

import torch
import torch.distributed as dist

num_checked = 0


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32, device=device)


def check(name, result, expected):
    """Check a result. If it is wrong, end this rank with exit status 1, and torchrun ends the other ranks."""
    global num_checked
    num_checked += 1
    result = result.tolist() if isinstance(result, torch.Tensor) else result
    if result != expected:
        sys.stderr.write(f"{Path(__file__).name}: rank {rank}: {name}: got {result}, not {expected}\n")
        raise SystemExit(1)


def draw(name, before, after):
    """Print on rank 0 the values of each rank before and after. All ranks must call it."""
    lines = [None] * world_size if rank == 0 else None
    before, after = (
        " ".join(f"{value:g}" for value in values.tolist()) if isinstance(values, torch.Tensor) else values
        for values in (before, after)
    )
    dist.gather_object(f"{before:>18}  ->  {after}", lines)
    for sender, line in enumerate(lines or ()):
        print(f"{name if sender == 0 else '':<22} rank {sender} {line}", flush=True)


def broadcast():
    """Copy a tensor of one rank to all ranks. For example: parameters at the start of a training.

    rank 0  7         rank 0  7
    rank 1  -    ->   rank 1  7
    rank 2  -         rank 2  7
    """
    tensor = numbers(7 if rank == 0 else 0)
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    check("broadcast", tensor, [7])
    draw("broadcast", before, tensor)


def reduce_to_one():
    """Sum over all ranks, on one rank.

    rank 0  1         rank 0  6
    rank 1  2    ->   rank 1  ?
    rank 2  3         rank 2  ?
    """
    before = numbers(rank + 1)
    tensor = before.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    if rank == 0:
        check("reduce", tensor, [world_size * (world_size + 1) / 2])
    draw("reduce", before, tensor if rank == 0 else "(undefined)")


def all_reduce():
    """Sum over all ranks, on every rank. For example: gradients in DDP, losses, counts.

    rank 0  1         rank 0  6
    rank 1  2    ->   rank 1  6
    rank 2  3         rank 2  6
    """
    before = numbers(rank + 1)
    tensor = before.clone()
    work = dist.all_reduce(tensor, async_op=True)  # optional for every collective: compute something else before wait()
    work.wait()
    check("all_reduce", tensor, [world_size * (world_size + 1) / 2])
    draw("all_reduce", before, tensor)


def all_reduce_with_other_operations():
    """Reduce by AVG, PRODUCT, MIN and MAX, and by BAND, BOR and BXOR (integers only), which NCCL does not support."""
    ranks = range(1, world_size + 1)
    expected = {"AVG": sum(ranks) / world_size, "PRODUCT": 2 ** (world_size // 2), "MIN": 1, "MAX": world_size}
    if dist.get_backend() != "nccl":
        expected |= {"BAND": reduce(and_, ranks), "BOR": reduce(or_, ranks), "BXOR": reduce(xor, ranks)}
    for name, value in expected.items():
        dtype = torch.int64 if name in ("BAND", "BOR", "BXOR") else torch.float32  # AVG does not support integers
        local = 1 + rank % 2 if name == "PRODUCT" else rank + 1  # 1 * 2 * ... * 14 is not exact in float32
        tensor = torch.tensor([local], dtype=dtype, device=device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        check(f"all_reduce {name}", tensor, [value])
        draw(f"all_reduce {name}", numbers(local), tensor)


def gather():
    """Collect a tensor of each rank on one rank. For example: outputs that one rank evaluates or writes.

    rank 0  0         rank 0  0 10 20
    rank 1  10   ->   rank 1
    rank 2  20        rank 2
    """
    local = numbers(10 * rank)
    gathered = [torch.empty_like(local) for _ in range(world_size)] if rank == 0 else None
    dist.gather(local, gathered, dst=0)
    if rank == 0:
        check("gather", torch.cat(gathered), [10 * sender for sender in range(world_size)])
    draw("gather", local, torch.cat(gathered) if rank == 0 else "")


def scatter():
    """Send a different tensor from one rank to each rank. For example: rows that one rank has read.

    rank 0  0 10 20        rank 0  0
    rank 1            ->   rank 1  10
    rank 2                 rank 2  20
    """
    rows = [numbers(10 * receiver) for receiver in range(world_size)] if rank == 0 else None
    local = numbers(-1)
    dist.scatter(local, rows, src=0)
    check("scatter", local, [10 * rank])
    draw("scatter", torch.cat(rows) if rank == 0 else "", local)


def all_gather():
    """Collect a tensor of each rank on every rank. For example: the shards of a parameter in FSDP.

    rank 0  0         rank 0  0 10 20
    rank 1  10   ->   rank 1  0 10 20
    rank 2  20        rank 2  0 10 20
    """
    local = numbers(10 * rank)
    gathered = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(gathered, local)
    check("all_gather", torch.cat(gathered), [10 * sender for sender in range(world_size)])
    draw("all_gather", local, torch.cat(gathered))


def reduce_scatter():
    """Sum over all ranks. Each rank gets one chunk of the sum. For example: gradients of the shards in FSDP.

    rank 0  0 1 2           rank 0  30
    rank 1  10 11 12   ->   rank 1  33
    rank 2  20 21 22        rank 2  36
    """
    chunks = [numbers(10 * rank + receiver) for receiver in range(world_size)]
    local = numbers(-1)
    dist.reduce_scatter(local, chunks)
    check("reduce_scatter", local, [sum(10 * sender + rank for sender in range(world_size))])
    draw("reduce_scatter", torch.cat(chunks), local)


def all_to_all():
    """Send a different tensor from each rank to each rank: a transpose. For example: tokens to their experts.

    rank 0  0 1 2           rank 0  0 10 20
    rank 1  10 11 12   ->   rank 1  1 11 21
    rank 2  20 21 22        rank 2  2 12 22
    """
    local = numbers(*(10 * rank + receiver for receiver in range(world_size)))
    received = torch.empty_like(local)
    dist.all_to_all_single(received, local)
    check("all_to_all", received, [10 * sender + rank for sender in range(world_size)])
    draw("all_to_all", local, received)


def all_to_all_uneven():
    """Use different sizes in all_to_all. For example, rank r gets r + 1 numbers from every rank.

    rank 0  0 1 1 2 2 2               rank 0  0 10 20
    rank 1  10 11 11 12 12 12    ->   rank 1  1 1 11 11 21 21
    rank 2  20 21 21 22 22 22         rank 2  2 2 2 12 12 12 22 22 22
    """
    send_counts = [receiver + 1 for receiver in range(world_size)]  # for each receiver
    receive_counts = [rank + 1] * world_size  # for each sender. If ranks do not know them, send the counts first
    local = numbers(*(10 * rank + receiver for receiver in range(world_size) for _ in range(receiver + 1)))
    received = local.new_empty(sum(receive_counts))
    dist.all_to_all_single(received, local, receive_counts, send_counts)
    check("all_to_all uneven", received, [10 * sender + rank for sender in range(world_size) for _ in range(rank + 1)])
    draw("all_to_all uneven", local, received)


def barrier():
    """Wait until every rank has called it. This is rarely needed, because collectives wait for their data anyway."""
    started = time.monotonic()
    time.sleep(0.1 * rank)  # the last rank arrives last
    arrived = time.monotonic()
    dist.barrier()
    left = time.monotonic()
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:  # the clocks of several hosts cannot be compared
        latest = torch.tensor(
            [arrived, -left], dtype=torch.float64, device=device
        )  # MAX gives the last arrival and the first departure
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        check("barrier: all arrived before one left", bool(latest[0] <= -latest[1]), True)
    draw("barrier", f"arrived at {arrived - started:.1f} s", f"left at {left - started:.1f} s")


def objects():
    """Send objects by pickle. Unpickling can run any code, so receive objects only from ranks that you trust."""
    result = [{"lr": 0.1} if rank == 0 else None]
    dist.broadcast_object_list(result, src=0)
    check("broadcast_object_list", result, [{"lr": 0.1}])
    draw("broadcast_object_list", "" if rank else str(result[0]), str(result[0]))
    result = [None] * world_size
    dist.all_gather_object(result, "abcdefghijkl"[: rank + 1])  # sizes may differ
    check("all_gather_object", result, ["abcdefghijkl"[: sender + 1] for sender in range(world_size)])
    draw("all_gather_object", result[rank], " ".join(result))
    received = [None]
    dist.scatter_object_list(
        received, [f"for {receiver}" for receiver in range(world_size)] if rank == 0 else None, src=0
    )
    check("scatter_object_list", received, [f"for {rank}"])
    draw("scatter_object_list", "" if rank else "one for each", received[0])
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object((rank, rank**2), gathered, dst=0)
    if rank == 0:
        check("gather_object", gathered, [(sender, sender**2) for sender in range(world_size)])
    draw("gather_object", str((rank, rank**2)), str(gathered) if rank == 0 else "")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.stderr.write(f"{Path(__file__).name}: start it with torchrun, by the command at the top of the file\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun. The timeout ends the wait for a rank that died or called another collective.
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(minutes=2), device_id=device_id)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for operation in (
        broadcast,
        reduce_to_one,
        all_reduce,
        all_reduce_with_other_operations,
        gather,
        scatter,
        all_gather,
        reduce_scatter,
        all_to_all,
        all_to_all_uneven,
        barrier,
        objects,
    ):
        operation()
    total = numbers(num_checked)
    dist.all_reduce(total)
    if rank == 0:
        print(f"{total.item():g} results on {world_size} ranks, all correct")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()
