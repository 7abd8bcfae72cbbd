"""Every collective operation: a picture of who has what before and after, drawn from a real run, and each checked.

Run: torchrun --standalone --nproc-per-node 3 collectives.py

Holds     a few numbers, on every rank; nothing is trained
Travels   what each picture shows; the headers of the other recipes say which of these they use for what
Use when  you look for the operation that does what you need, or want to see that it does

What goes wrong:
- Every rank of the group calls the same operation, in the same order, with the same shape and dtype. A rank that does
  not leaves the others waiting until the timeout; which one it was dist.monitored_barrier says (gloo only).
- After reduce only the root's tensor is the sum: the others may hold parts of it, or what they had.
- async_op=True returns a work: until its wait(), leave the tensors alone.
- Objects (broadcast_object_list and its like) travel pickled. Unpickling runs code: only between ranks that you trust.
  They are slow, too: numbers travel as tensors.
- The bits of a sum depend on the order of adding up: on the number of ranks and the backend. All ranks get the same.
"""

import os
import sys
import time
from datetime import timedelta
from functools import reduce
from operator import and_, mul, or_, xor
from pathlib import Path

import torch
import torch.distributed as dist

num_checked = 0


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32, device=device)


def check(what, result, expected):
    """Ends this rank with status 1 where a result is not what it has to be; torchrun then ends the others."""
    global num_checked
    num_checked += 1
    result = result.tolist() if isinstance(result, torch.Tensor) else result
    if result != expected:
        sys.stderr.write(f"{Path(__file__).name}: rank {rank}: {what}: got {result}, not {expected}\n")
        raise SystemExit(1)


def draw(name, before, after):
    """Rank 0 prints what each rank had and has. Itself a collective: every rank calls it."""
    lines = [None] * world_size if rank == 0 else None
    before, after = (
        " ".join(f"{v:g}" for v in x.tolist()) if isinstance(x, torch.Tensor) else x for x in (before, after)
    )
    dist.gather_object(f"{before:>18}  ->  {after}", lines)
    for sender, line in enumerate(lines or ()):
        print(f"{name if sender == 0 else '':<22} rank {sender} {line}", flush=True)


def broadcast():
    """What one rank has, on all: parameters at the start of a training.

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
    """The sum, on one rank.

    rank 0  1         rank 0  6
    rank 1  2    ->   rank 1  ?
    rank 2  3         rank 2  ?
    """
    before = numbers(rank + 1)
    tensor = before.clone()
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    if rank == 0:
        check("reduce", tensor, [world_size * (world_size + 1) / 2])
    draw("reduce", before, tensor if rank == 0 else "(whatever)")


def all_reduce():
    """The sum, on all ranks: gradients in DDP, losses, counts.

    rank 0  1         rank 0  6
    rank 1  2    ->   rank 1  6
    rank 2  3         rank 2  6
    """
    before = numbers(rank + 1)
    tensor = before.clone()
    work = dist.all_reduce(tensor, async_op=True)  # as every collective can be called; here you compute something else
    work.wait()
    check("all_reduce", tensor, [world_size * (world_size + 1) / 2])
    draw("all_reduce", before, tensor)


def all_reduce_with_other_operations():
    """SUM, AVG, PRODUCT, MIN, MAX; BAND, BOR, BXOR for whole numbers, which NCCL does not have."""
    ranks = range(1, world_size + 1)
    expected = {"AVG": sum(ranks) / world_size, "PRODUCT": reduce(mul, ranks), "MIN": 1, "MAX": world_size}
    if dist.get_backend() != "nccl":
        expected |= {"BAND": reduce(and_, ranks), "BOR": reduce(or_, ranks), "BXOR": reduce(xor, ranks)}
    for name, value in expected.items():
        dtype = torch.int64 if name in ("BAND", "BOR", "BXOR") else torch.float32  # AVG of integers is refused
        tensor = torch.tensor([rank + 1], dtype=dtype, device=device)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        check(f"all_reduce {name}", tensor, [value])
        draw(f"all_reduce {name}", numbers(rank + 1), tensor)


def gather():
    """A part of each, on one rank: outputs that one rank judges or writes.

    rank 0  0         rank 0  0 10 20
    rank 1  10   ->   rank 1
    rank 2  20        rank 2
    """
    local = numbers(10 * rank)
    parts = [torch.empty_like(local) for _ in range(world_size)] if rank == 0 else None
    dist.gather(local, parts, dst=0)
    if rank == 0:
        check("gather", torch.cat(parts), [10 * sender for sender in range(world_size)])
    draw("gather", local, torch.cat(parts) if rank == 0 else "")


def scatter():
    """A part for each, from one rank: rows that one rank has read.

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
    """A part of each, on all ranks: shards of a parameter, before FSDP computes with it.

    rank 0  0         rank 0  0 10 20
    rank 1  10   ->   rank 1  0 10 20
    rank 2  20        rank 2  0 10 20
    """
    local = numbers(10 * rank)
    parts = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(parts, local)
    check("all_gather", torch.cat(parts), [10 * sender for sender in range(world_size)])
    draw("all_gather", local, torch.cat(parts))


def reduce_scatter():
    """A part of the sum on each rank: gradients in FSDP, where each rank needs those of its shard.

    rank 0  0 1 2           rank 0  30
    rank 1  10 11 12   ->   rank 1  33
    rank 2  20 21 22        rank 2  36
    """
    parts = [numbers(10 * rank + receiver) for receiver in range(world_size)]
    local = numbers(-1)
    dist.reduce_scatter(local, parts)
    check("reduce_scatter", local, [sum(10 * sender + rank for sender in range(world_size))])
    draw("reduce_scatter", torch.cat(parts), local)


def all_to_all():
    """From each to each: what was cut by rows is cut by columns; heads for positions, experts for tokens.

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
    """The same where each gets another number: here rank r gets r + 1 from everybody.

    rank 0  0 1 1 2 2 2               rank 0  0 10 20
    rank 1  10 11 11 12 12 12    ->   rank 1  1 1 11 11 21 21
    rank 2  20 21 21 22 22 22         rank 2  2 2 2 12 12 12 22 22 22
    """
    given = [receiver + 1 for receiver in range(world_size)]  # how many go to each rank
    taken = [rank + 1] * world_size  # how many come from each: both sides have to know; else send the numbers first
    local = numbers(*(10 * rank + receiver for receiver in range(world_size) for _ in range(receiver + 1)))
    received = local.new_empty(sum(taken))
    dist.all_to_all_single(received, local, taken, given)
    check("all_to_all uneven", received, [10 * sender + rank for sender in range(world_size) for _ in range(rank + 1)])
    draw("all_to_all uneven", local, received)


def barrier():
    """Nobody goes on before all have come. Rarely needed: every collective that gives a result waits for it anyway."""
    began = time.monotonic()
    time.sleep(0.1 * rank)  # the last rank comes last
    came = time.monotonic()
    dist.barrier()
    left = time.monotonic()
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:  # the clocks of several hosts cannot be compared
        latest = torch.tensor([came, -left], dtype=torch.float64, device=device)  # the last to come, the first to leave
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        check("barrier: all came before one left", bool(latest[0] <= -latest[1]), True)
    draw("barrier", f"came at {came - began:.1f} s", f"left at {left - began:.1f} s")


def objects():
    """Anything that can be pickled. Who receives it unpickles it, and that may run any code: trust the sender."""
    result = [{"lr": 0.1} if rank == 0 else None]
    dist.broadcast_object_list(result, src=0)
    check("broadcast_object_list", result, [{"lr": 0.1}])
    draw("broadcast_object_list", "" if rank else str(result[0]), str(result[0]))
    result = [None] * world_size
    dist.all_gather_object(result, "abcdefghijkl"[: rank + 1])  # of any size
    check("all_gather_object", result, ["abcdefghijkl"[: sender + 1] for sender in range(world_size)])
    draw("all_gather_object", result[rank], " ".join(result))
    box = [None]
    dist.scatter_object_list(box, [f"for {receiver}" for receiver in range(world_size)] if rank == 0 else None, src=0)
    check("scatter_object_list", box, [f"for {rank}"])
    draw("scatter_object_list", "" if rank else "one for each", box[0])
    everything = [None] * world_size if rank == 0 else None
    dist.gather_object((rank, rank**2), everything, dst=0)
    if rank == 0:
        check("gather_object", everything, [(sender, sender**2) for sender in range(world_size)])
    draw("gather_object", str((rank, rank**2)), str(everything) if rank == 0 else "")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.stderr.write(f"{Path(__file__).name}: start it by torchrun: its header says how\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun. The timeout ends the wait for a rank that died, or calls something else.
    name, bound = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(name, timeout=timedelta(minutes=2), device_id=bound)
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
        print(f"{total.item():g} results on {world_size} ranks, all right")
    time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
    dist.destroy_process_group()
