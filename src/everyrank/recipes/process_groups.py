"""Process groups: collectives of some of the ranks, and a device mesh with a group for each row and column.

Run: torchrun --standalone --nproc-per-node 4 process_groups.py

Memory         one number on every rank; there is no training
Communication  sums within a group; ranks of other groups do not wait
Use when       ranks have different roles: tensor parallel within a host, data parallel between hosts, pipeline stages

Pitfalls:
- All ranks have to call new_group() for every group, in the same order, also ranks that are not members.
  `if rank in members: dist.new_group(members)` waits for the other ranks until the timeout.
- Ranks outside the group get NON_GROUP_MEMBER. A collective on it prints a warning and does nothing.
- With use_local_synchronization=True, only members call new_group(). A rank in several groups has to create them in
  the same order as the other members. Otherwise they wait for each other.
- A rank has a global rank and a rank in each group. src= and dst= take the global rank, group_src= and group_dst= the
  rank in the group. The wrong number selects a different rank, or one that does not exist.
- Groups need connections and memory. Create them once, before the training.
- new_group() does not inherit the timeout of init_process_group. Pass timeout=... for each group.
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


def check(name, result, expected):
    """Check a result. If it is wrong, end this rank with exit status 1, and torchrun ends the other ranks."""
    global num_checked
    num_checked += 1
    if result != expected:
        sys.stderr.write(f"{Path(__file__).name}: rank {rank}: {name}: got {result}, not {expected}\n")
        raise SystemExit(1)


def print_on_rank_0(heading, local_line=None):
    """Print a heading on rank 0, and a line for each rank. With `local_line`, all ranks must call it."""
    lines = [None] * world_size
    if local_line is not None:
        dist.all_gather_object(lines, local_line)
    if rank == 0:
        print(
            heading, *(f"    rank {sender}: {line}" for sender, line in enumerate(lines) if line), sep="\n", flush=True
        )


def sum_over_ranks(value, group=None):
    """Return the sum of `value` over the ranks of the group."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def new_group_of_even_ranks():
    """Call new_group on all ranks, members or not.

    world  0 1 2 3        group of the even ranks  0 . 2 .        ranks in the group  0 . 1 .
    """
    even = list(range(0, world_size, 2))
    group = dist.new_group(even, timeout=TIMEOUT)
    if rank not in even:
        check("group on other ranks", group, dist.GroupMember.NON_GROUP_MEMBER)
        print_on_rank_0("new_group of the even ranks", "not a member, but it has to call new_group, too")
        return
    group_rank = dist.get_rank(group)
    check("rank in the group", group_rank, rank // 2)
    check("global rank", dist.get_global_rank(group, group_rank), rank)
    check("ranks of the group", dist.get_process_group_ranks(group), even)
    group_sum = sum_over_ranks(rank, group)
    check("sum of the even ranks", group_sum, sum(even))
    # The last member broadcasts. group_src is its rank in the group, which differs from its global rank.
    tensor = torch.tensor([rank], device=device)
    dist.broadcast(tensor, group=group, group_src=len(even) - 1)
    check("broadcast from group_src", tensor.item(), even[-1])
    print_on_rank_0(
        "new_group of the even ranks", f"rank {group_rank} of {len(even)} in the group; sum of its ranks: {group_sum}"
    )


def several_groups():
    """Create several disjoint groups by new_subgroups_by_enumeration, which returns to each rank its own group.

    world  0 1 2 3        groups  [0 1] [2 3]        sums  1 1 5 5
    """
    half = math.ceil(world_size / 2)
    halves = [ranks for ranks in (list(range(half)), list(range(half, world_size))) if ranks]
    group, groups = dist.new_subgroups_by_enumeration(halves, timeout=TIMEOUT)
    members = halves[rank // half]
    check("groups", len(groups), len(halves))
    check("ranks of the group", dist.get_process_group_ranks(group), members)
    group_sum = sum_over_ranks(rank, group)
    check("sum of the group", group_sum, sum(members))
    print_on_rank_0(f"new_subgroups_by_enumeration, {halves}", f"in {members}; sum of its ranks: {group_sum}")


def mesh_of_two_axes():
    """Arrange the ranks in a grid by init_device_mesh, with a group for each row and each column.

                tensor 0   tensor 1
    data 0      rank 0     rank 1        rows: ranks that compute the same samples together
    data 1      rank 2     rank 3        columns: ranks with the same part of the model, which average gradients
    """
    num_columns = max(degree for degree in range(1, math.isqrt(world_size) + 1) if world_size % degree == 0)
    shape = (world_size // num_columns, num_columns)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    row, column = divmod(rank, num_columns)
    check("coordinates", list(mesh.get_coordinate()), [row, column])
    in_row = [row * num_columns + index for index in range(num_columns)]
    in_column = [index * num_columns + column for index in range(shape[0])]
    for axis, expected in (("tensor", in_row), ("data", in_column)):
        group = mesh.get_group(axis)
        check(f"ranks along {axis}", dist.get_process_group_ranks(group), expected)
        check(f"rank along {axis}", mesh.get_local_rank(axis), expected.index(rank))
        check(f"sum along {axis}", sum_over_ranks(rank, group), sum(expected))
    # The sum along one axis and then along the other is the sum over all ranks.
    both = sum_over_ranks(sum_over_ranks(rank, mesh.get_group("tensor")), mesh.get_group("data"))
    check("sum along both axes", both, sum(range(world_size)))
    line = (
        f"data {row}, tensor {column}: sum {sum(in_row)} in its row, {sum(in_column)} in its column, {both} over both"
    )
    print_on_rank_0(f"init_device_mesh, {shape[0]} x {shape[1]}, axes data and tensor", line)


def members_only():
    """Call new_group on members only, with use_local_synchronization=True. Without it, they would wait for all ranks.

    rank 0: new_group([0], use_local_synchronization=True)        other ranks: no call
    """
    if rank == 0:
        group = dist.new_group([0], timeout=TIMEOUT, use_local_synchronization=True)
        check("sum of the group of one", sum_over_ranks(5, group), 5)
    print_on_rank_0("new_group, called only by its member rank 0: use_local_synchronization=True")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.stderr.write(f"{Path(__file__).name}: start it with torchrun, by the command at the top of the file\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks. The timeout ends a deadlock. With device_id, NCCL would split each group from
    # this one and wait for all ranks, also with use_local_synchronization, so there is no device_id.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for example in (new_group_of_even_ranks, several_groups, mesh_of_two_axes, members_only):
        example()
    total = sum_over_ranks(num_checked)
    print_on_rank_0(f"{total} results on {world_size} ranks, all correct")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()
