"""Process groups: collectives among some of the ranks, and a mesh of two axes, with a group along each row and column.

Run: torchrun --standalone --nproc-per-node 4 process_groups.py

Holds     a number, on every rank; nothing is trained
Travels   sums, inside the group that they are for; ranks of other groups neither wait nor notice
Use when  ranks differ in what they do: tensor parallel inside a host, data parallel between hosts, stages of a pipeline

What goes wrong:
- new_group() has to be called by every rank of the world, for every group, in the same order; by those that are not in
  it, too. `if rank in members: dist.new_group(members)` waits for them until the timeout.
- Those outside get NON_GROUP_MEMBER, which is no group: a collective on it warns, and does nothing.
- use_local_synchronization=True is the way out: only the members call it. Ranks that are in several groups have to make
  them in one order, else they wait for each other.
- A rank has one number in the world and another in each group. src= and dst= take that of the world, group_src= and
  group_dst= that of the group: with the wrong one of the two, somebody else is meant, or nobody.
- Groups cost connections and memory: make them once, before the training, not in every step.
- One timeout for each group: new_group(timeout=...) does not inherit that of init_process_group.
"""

import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

TIMEOUT = timedelta(minutes=2)
num_checked = 0


def check(what, found, right):
    """Ends this rank with status 1 where a result is not what it has to be; torchrun then ends the others."""
    global num_checked
    num_checked += 1
    if found != right:
        sys.stderr.write(f"{Path(__file__).name}: rank {rank}: {what}: got {found}, not {right}\n")
        raise SystemExit(1)


def say(text, own=None):
    """Rank 0 prints a title, and a line of each rank under it. Itself a collective: every rank calls it."""
    lines = [None] * world_size
    if own is not None:
        dist.all_gather_object(lines, own)
    if rank == 0:
        print(text, *(f"    rank {sender}: {line}" for sender, line in enumerate(lines) if line), sep="\n", flush=True)


def total(value, group=None):
    """The sum of what the ranks of the group bring."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def one_group_by_hand():
    """new_group: every rank calls it, in the group or not.

    world  0 1 2 3        group of the even ranks  0 . 2 .        their numbers in it  0 . 1 .
    """
    even = list(range(0, world_size, 2))
    group = dist.new_group(even, timeout=TIMEOUT)
    if rank not in even:
        check("what a rank outside gets", group, dist.GroupMember.NON_GROUP_MEMBER)
        say("new_group, of the even ranks", "not in it; it called new_group all the same")
        return
    number = dist.get_rank(group)
    check("number in the group", number, rank // 2)
    check("number in the world", dist.get_global_rank(group, number), rank)
    check("ranks of the group", dist.get_process_group_ranks(group), even)
    found = total(rank, group)
    check("sum of the even ranks", found, sum(even))
    # The last of the group sends to all of it: by its number in the group, which in the world is another one.
    tensor = torch.tensor([rank], device=device)
    dist.broadcast(tensor, group=group, group_src=len(even) - 1)
    check("broadcast by a number of the group", tensor.item(), even[-1])
    say("new_group, of the even ranks", f"number {number} of {len(even)} in it; the sum of its ranks is {found}")


def all_groups_at_once():
    """new_subgroups_by_enumeration: several groups that share no rank, and each rank gets its own.

    world  0 1 2 3        groups  [0 1] [2 3]        sums  1 1 5 5
    """
    half = math.ceil(world_size / 2)
    members = [part for part in (list(range(half)), list(range(half, world_size))) if part]
    own, groups = dist.new_subgroups_by_enumeration(members, timeout=TIMEOUT)
    mine = members[rank // half]
    check("groups", len(groups), len(members))
    check("ranks of the own group", dist.get_process_group_ranks(own), mine)
    found = total(rank, own)
    check("sum of the own half", found, sum(mine))
    say(f"new_subgroups_by_enumeration, {members}", f"in {mine}, whose sum is {found}")


def mesh_of_two_axes():
    """init_device_mesh: the ranks as a grid, with a group along each row and one along each column.

                tensor 0   tensor 1
    data 0      rank 0     rank 1        rows: ranks that compute one sample together
    data 1      rank 2     rank 3        columns: ranks that hold the same part of the model, and average gradients
    """
    num_columns = max(degree for degree in range(1, math.isqrt(world_size) + 1) if world_size % degree == 0)
    shape = (world_size // num_columns, num_columns)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    row, column = divmod(rank, num_columns)
    check("coordinates", list(mesh.get_coordinate()), [row, column])
    in_row = [row * num_columns + place for place in range(num_columns)]
    in_column = [place * num_columns + column for place in range(shape[0])]
    for axis, right in (("tensor", in_row), ("data", in_column)):
        group = mesh.get_group(axis)
        check(f"ranks along {axis}", dist.get_process_group_ranks(group), right)
        check(f"number along {axis}", mesh.get_local_rank(axis), right.index(rank))
        check(f"sum along {axis}", total(rank, group), sum(right))
    # A sum along one axis and then along the other is the sum of the world.
    both = total(total(rank, mesh.get_group("tensor")), mesh.get_group("data"))
    check("sum along both axes", both, sum(range(world_size)))
    text = (
        f"data {row}, tensor {column}: sums {sum(in_row)} in its row, {sum(in_column)} in its column, {both} over both"
    )
    say(f"init_device_mesh, {shape[0]} x {shape[1]}, axes data and tensor", text)


def members_only():
    """The trap: where only the members call new_group, it waits for the others. With local synchronization it does not.

    rank 0: new_group([0], use_local_synchronization=True)        the others: nothing, they go on
    """
    if rank == 0:
        alone = dist.new_group([0], timeout=TIMEOUT, use_local_synchronization=True)
        check("sum of the group of one", total(5, alone), 5)
    say("new_group, only by its member rank 0: use_local_synchronization=True")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.stderr.write(f"{Path(__file__).name}: start it by torchrun: its header says how\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun. The timeout ends what would wait for ever. Without device_id: with it NCCL
    # splits each group from this one, for which it waits for all ranks, also under use_local_synchronization.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for lesson in (one_group_by_hand, all_groups_at_once, mesh_of_two_axes, members_only):
        lesson()
    everything = total(num_checked)
    say(f"{everything} results on {world_size} ranks, all right")
    time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
    dist.destroy_process_group()
