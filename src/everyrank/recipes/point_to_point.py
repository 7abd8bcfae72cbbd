"""Point-to-point communication: send, recv, isend, irecv, tags, recv from any rank, and batch_isend_irecv.

Run: torchrun --standalone --nproc-per-node 3 point_to_point.py

Memory         one small tensor on every rank; there is no training, and each result is checked
Communication  one tensor from one rank to another; the other ranks do not take part
Use when       one rank needs data of one other rank: stages of a pipeline, neighbours in a ring or grid, a work queue

Pitfalls:
- send() blocks until the receiver has received. (With MPI it may return earlier for small tensors: do not rely on it.)
  If two ranks both send first, or all ranks of a ring do, they wait until the timeout. Start the send with isend(),
  receive, then call wait(). Or let every second rank receive first.
- Between isend() or irecv() and wait(), do not write to the sent tensor and do not read the received one. Always call
  wait(). Otherwise the tensor may be freed before the transfer is done.
- Shape and dtype are not sent. Both sides have to know them, or send them first. Tensors have to be contiguous.
- NCCL supports neither tags nor recv from any rank. With NCCL, put transfers in both directions into one
  batch_isend_irecv.
- src= and dst= are global ranks. Within a group, use group=..., group_src=... and group_dst=...
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

num_checked = 0


def check(name, result, expected):
    """Check a result. If it is wrong, end this rank with exit status 1, and torchrun ends the other ranks."""
    global num_checked
    num_checked += 1
    if result != expected:
        sys.stderr.write(f"{Path(__file__).name}: rank {dist.get_rank()}: {name}: got {result}, not {expected}\n")
        raise SystemExit(1)


def print_on_rank_0(name, text):
    if dist.get_rank() == 0:
        print(f"{name:<18}  {text}", flush=True)


def send_and_recv(rank, world_size):
    """Use send and recv, which block. Each rank receives, adds 1 and sends, so a receiver is always waiting.

    rank 0 --0--> rank 1 --1--> rank 2 --2--> rank 0
    """
    tensor = torch.zeros(1)
    if rank > 0:
        dist.recv(tensor, src=rank - 1)
        check("recv from the previous rank", tensor.item(), rank - 1)
        tensor += 1
    dist.send(tensor, dst=(rank + 1) % world_size)
    if rank == 0:
        dist.recv(tensor, src=world_size - 1)
        check("value after one round", tensor.item(), world_size - 1)
    print_on_rank_0("send, recv", f"rank 0 sent 0, each other rank added 1, and it came back as {tensor.item():g}")


def isend_before_recv(rank, world_size):
    """Show why ranks deadlock if all call send first: a send is not done before the other side receives.

    rank 0: send(to 1) never returns, so recv is never called        rank 1: send(to 0) never returns

    An isend shows this without a deadlock: it is unfinished until the receiver calls recv.
    """
    sent, received = torch.tensor([float(rank)]), torch.zeros(1)
    sending = dist.isend(sent, dst=(rank + 1) % world_size)
    time.sleep(0.2)
    check("isend done before recv", sending.is_completed(), False)
    dist.barrier()  # until all ranks have checked
    dist.recv(received, src=(rank - 1) % world_size)
    sending.wait()
    check("recv after isend", received.item(), (rank - 1) % world_size)
    print_on_rank_0(
        "isend before recv",
        "unfinished after 0.2 s, where send() would still block; finished after a recv on each rank",
    )


def exchange_both_ways(rank, world_size):
    """Use isend and irecv: all transfers run at the same time, while this rank computes.

    rank 0 <---> rank 1 <---> rank 2 <---> rank 0        each rank with both neighbours, as in a grid
    """
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    sent = torch.tensor([rank, rank + 10])
    from_previous, from_following = torch.zeros_like(sent[:1]), torch.zeros_like(sent[:1])
    works = [
        dist.isend(sent[1:], dst=following, tag=1),
        dist.isend(sent[:1], dst=previous, tag=2),  # tags matter with two ranks: both neighbours are the same rank
        dist.irecv(from_previous, src=previous, tag=1),
        dist.irecv(from_following, src=following, tag=2),
    ]
    computed = sum(range(1000))  # any work that does not use these tensors
    for work in works:
        work.wait()
    check("irecv from both neighbours", [*from_previous.tolist(), *from_following.tolist()], [previous + 10, following])
    check("computed during the transfers", computed, 499500)
    print_on_rank_0(
        "isend, irecv",
        f"four transfers on each rank at once: got {from_previous.item()} and {from_following.item()}",
    )


def receive_by_tag(rank, _):
    """Use tags: recv takes the next message with its tag. Messages with the same tag arrive in the order of sending.

    rank 0: 100 with tag 1, 101 with tag 1, 200 with tag 2        rank 1: recv tag 2, recv tag 1, recv tag 1
    """
    if rank == 0:
        works = [dist.isend(torch.tensor([value]), dst=1, tag=tag) for tag, value in ((1, 100), (1, 101), (2, 200))]
        for work in works:
            work.wait()
    if rank == 1:
        values = []
        for tag in (2, 1, 1):
            received = torch.zeros(1, dtype=torch.int64)
            dist.recv(received, src=0, tag=tag)
            values.append(received.item())
        check("recv with tag 2, then tag 1 twice", values, [200, 100, 101])
    print_on_rank_0(
        "tag",
        "rank 0 sent 100 and 101 with tag 1, then 200 with tag 2; rank 1 received 200 first, then 100 and 101",
    )


def receive_from_any_rank(rank, world_size):
    """Call recv without src: it takes the first message that arrives and returns the sender, as in a work queue.

    rank 1 --1--> rank 0 <--4-- rank 2        answers: the squares of the ranks
    """
    if rank > 0:
        dist.send(torch.tensor([rank**2]), dst=0)
        return
    answers = {}
    for _ in range(world_size - 1):
        received = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(received)
        answers[source] = received.item()
    check("answers by rank", answers, {source: source**2 for source in range(1, world_size)})
    order = ", ".join(f"{answer} from rank {source}" for source, answer in answers.items())
    print_on_rank_0("recv from any rank", f"rank 0 received, in the order of arrival: {order}")


def exchange_in_a_batch(rank, world_size):
    """Start several transfers by one batch_isend_irecv. NCCL needs it, and it works with every backend.

    rank 0 --> rank 1 --> rank 2 --> rank 0
    """
    sent, received = torch.full((1000,), float(rank)), torch.empty(1000)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check("received in the batch", received.unique().tolist(), [(rank - 1) % world_size])
    print_on_rank_0(
        "batch_isend_irecv",
        f"each rank sent to the next one; rank 0 received 1000 numbers of rank {received[0].item():g}",
    )


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if world_size < 2:
        sys.stderr.write(f"{Path(__file__).name}: needs 2 or more ranks, got {world_size}: start it with torchrun\n")
        raise SystemExit(2)
    # torchrun passes address and ranks in the environment. The timeout ends a deadlock.
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    for example in (
        send_and_recv,
        isend_before_recv,
        exchange_both_ways,
        receive_by_tag,
        receive_from_any_rank,
        exchange_in_a_batch,
    ):
        example(rank, world_size)
        dist.barrier()  # so that a message of one example is not received by the next
    total = torch.tensor([num_checked])
    dist.all_reduce(total)
    print_on_rank_0("", f"{total.item()} results on {world_size} ranks, all correct")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
