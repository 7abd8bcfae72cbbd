"""Point to point: one rank sends, one receives. Blocking or not, both ways at once, with tags, from anyone, in a batch.

Run: torchrun --standalone --nproc-per-node 3 point_to_point.py

Holds     one small tensor, on every rank; nothing is trained, and each result is checked
Travels   from the rank that sends to the rank that it names; no other rank notices
Use when  one rank has what one other needs: stages of a pipeline, neighbours on a ring or a grid, a queue of work

What goes wrong:
- send() returns when the other has received (over MPI, for small tensors, it may return before: do not count on it).
  Two ranks that both send first wait for each other until the timeout, and so do all ranks of a ring. Start the send
  with isend(), receive, then wait(); or let every other rank receive first.
- Between isend() and wait() the tensor belongs to the transfer: do not write into what is sent, do not read what is
  received. A work whose wait() was never called may be unfinished when its tensor is gone.
- Shape and dtype do not travel. Both sides have to know them, or send them first; and only contiguous tensors go.
- NCCL knows neither tags nor "from anyone", and there two transfers both ways have to be one batch_isend_irecv.
- These functions count ranks of the whole world. Inside a group: group=..., group_src=..., group_dst=...
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

num_checked = 0


def check(what, found, right):
    """Ends this rank with status 1 where a result is not what it has to be; torchrun then ends the others."""
    global num_checked
    num_checked += 1
    if found != right:
        sys.stderr.write(f"{Path(__file__).name}: rank {dist.get_rank()}: {what}: got {found}, not {right}\n")
        raise SystemExit(1)


def say(name, text):
    if dist.get_rank() == 0:
        print(f"{name:<18}  {text}", flush=True)


def pass_from_hand_to_hand(rank, world_size):
    """send and recv, which block. Each rank adds 1 and passes on, so there is always one that receives already.

    rank 0 --0--> rank 1 --1--> rank 2 --2--> rank 0
    """
    tensor = torch.zeros(1)
    if rank > 0:
        dist.recv(tensor, src=rank - 1)
        check("recv from the rank before", tensor.item(), rank - 1)
        tensor += 1
    dist.send(tensor, dst=(rank + 1) % world_size)
    if rank == 0:
        dist.recv(tensor, src=world_size - 1)
        check("what went around", tensor.item(), world_size - 1)
    say("send, recv", f"a zero went around, and every other rank added 1: it came back as {tensor.item():g}")


def all_send_first(rank, world_size):
    """Why two blocking sends wait for each other: a send is not done before the other side receives.

    rank 0: send(to 1) ... never gets to its recv        rank 1: send(to 0) ... never gets to its recv

    isend shows it without the wait: it is unfinished for as long as nobody receives.
    """
    sent, received = torch.tensor([float(rank)]), torch.zeros(1)
    sending = dist.isend(sent, dst=(rank + 1) % world_size)
    time.sleep(0.2)
    check("isend done before anybody receives", sending.is_completed(), False)
    dist.barrier()  # all have looked
    dist.recv(received, src=(rank - 1) % world_size)
    sending.wait()
    check("recv after isend", received.item(), (rank - 1) % world_size)
    say("all send first", "0.2 s later no send was done: send() would still wait. One recv on each rank, and all were")


def exchange_both_ways(rank, world_size):
    """isend and irecv: both are under way at once, and this rank computes meanwhile.

    rank 0 <---> rank 1 <---> rank 2 <---> rank 0        each with both of its neighbours, as at the edges of a grid
    """
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    own = torch.tensor([rank, rank + 10])
    from_before, from_after = torch.zeros_like(own[:1]), torch.zeros_like(own[:1])
    works = [
        dist.isend(own[1:], dst=after, tag=1),
        dist.isend(own[:1], dst=before, tag=2),  # with two ranks both neighbours are one: the tags tell what is what
        dist.irecv(from_before, src=before, tag=1),
        dist.irecv(from_after, src=after, tag=2),
    ]
    computed = sum(range(1000))  # anything that touches none of these tensors
    for work in works:
        work.wait()
    check("irecv from both neighbours", [*from_before.tolist(), *from_after.tolist()], [before + 10, after])
    check("computed meanwhile", computed, 499500)
    say(
        "isend, irecv",
        f"four transfers on each rank at once: {from_before.item()} from before, {from_after.item()} from after",
    )


def receive_by_tag(rank, _):
    """With different tags messages are taken in the order in which they are asked for; with one tag, as they were sent.

    rank 0: 100 with tag 1, 101 with tag 1, 200 with tag 2        rank 1: recv tag 2, recv tag 1, recv tag 1
    """
    if rank == 0:
        works = [dist.isend(torch.tensor([value]), dst=1, tag=tag) for tag, value in ((1, 100), (1, 101), (2, 200))]
        for work in works:
            work.wait()
    if rank == 1:
        found = []
        for tag in (2, 1, 1):
            received = torch.zeros(1, dtype=torch.int64)
            dist.recv(received, src=0, tag=tag)
            found.append(received.item())
        check("tag 2 asked for first, then tag 1 twice", found, [200, 100, 101])
    say(
        "tag",
        "sent 100 and 101 with tag 1, then 200 with tag 2; rank 1 took 200 first, then 100 and 101 in their order",
    )


def receive_from_anyone(rank, world_size):
    """recv without src takes what comes first, and returns from whom: a queue of work, without a fixed order.

    rank 1 --1--> rank 0 <--4-- rank 2        the answers are the squares
    """
    if rank > 0:
        dist.send(torch.tensor([rank**2]), dst=0)
        return
    answers = {}
    for _ in range(world_size - 1):
        received = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(received)
        answers[source] = received.item()
    check("answers by the rank that gave them", answers, {source: source**2 for source in range(1, world_size)})
    order = ", ".join(f"{answer} by rank {source}" for source, answer in answers.items())
    say("from anyone", f"rank 0 asked for the squares of the ranks and got, as they came: {order}")


def exchange_in_a_batch(rank, world_size):
    """batch_isend_irecv: one call that starts all of them. NCCL needs this, other backends do the same with it.

    rank 0 --> rank 1 --> rank 2 --> rank 0
    """
    sent, received = torch.full((1000,), float(rank)), torch.empty(1000)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check("all that came in the batch", received.unique().tolist(), [(rank - 1) % world_size])
    say(
        "batch_isend_irecv",
        f"each rank to the next one, at once: rank 0 has 1000 numbers of rank {received[0].item():g}",
    )


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    if world_size < 2:
        sys.stderr.write(f"{Path(__file__).name}: {world_size} ranks of torchrun: give 2 or more, that one can send\n")
        raise SystemExit(2)
    # Address and ranks come from torchrun. The timeout ends what would wait for ever.
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    for lesson in (
        pass_from_hand_to_hand,
        all_send_first,
        exchange_both_ways,
        receive_by_tag,
        receive_from_anyone,
        exchange_in_a_batch,
    ):
        lesson(rank, world_size)
        dist.barrier()  # so that what one lesson sends is not received by the next
    total = torch.tensor([num_checked])
    dist.all_reduce(total)
    say("", f"{total.item()} results on {world_size} ranks, all right")
    time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
