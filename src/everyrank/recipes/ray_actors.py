"""Distributed data parallel in Ray actors: Ray places one for each rank, and they form a process group of their own.

Run: python ray_actors.py --ranks 2

What to change for your own training:
- load() and build() are your data and your network. BATCH is the batch of all ranks.
- ray.init() finds the cluster in RAY_ADDRESS, or that of this node, else it starts one here. Name no script ray.py.
- On several nodes script and data have to be at the same place on each: shared storage, or what you name in
  ray.init(runtime_env={"working_dir": "."}). GLOO_SOCKET_IFNAME goes there too: {"env_vars": {...}}.
- Each actor sees its own GPU only, as cuda:0. Where there are fewer GPUs than ranks, all train on CPUs.
- Ray restarts no actor here: a rank cannot join a group that has begun. To go on after a fault, load a checkpoint in
  train() and run it all again.
"""

import argparse
import csv
import gzip
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
STRATEGY = "PACK"  # on as few nodes as it can; "STRICT_SPREAD" puts each rank on another
LONGEST = 24 * 3600  # seconds of training, after which a rank that says nothing is given up


def load(device, held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)], device=device)
    rows = rows[(torch.arange(len(rows), device=device) % 5 == 4) == held_out]
    return (rows[:, :64] / 16).to(DTYPE).reshape(-1, 1, 8, 8), rows[:, 64]


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every process."""

    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        # Group norm: its statistics do not span samples, so nothing needs synchronising across ranks.
        return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


@torch.no_grad()
def evaluate(model, rank, world_size, device):
    """The fraction of the held-out images that are read right; each is read by one rank, none is repeated."""
    images, labels = load(device, held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        own = batch.tensor_split(world_size)[rank]
        right += (model(images[own]).argmax(1) == labels[own]).sum()
    dist.all_reduce(right)
    return right.item() / len(images)


@ray.remote
class Rank:
    """A process that Ray starts, somewhere in its cluster."""

    def address(self):
        """Where this rank can listen: the node it is on, and a port that is free there now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, rank, world_size, address):
        """The losses of all updates, and top1."""
        cuda = bool(ray.get_gpu_ids())
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        # The timeout ends the wait for a rank that died.
        dist.init_process_group("nccl" if cuda else "gloo", address, timedelta(minutes=5), world_size, rank)
        losses = []

        images, labels = load(device, held_out=False)
        model = build().to(device, DTYPE)
        ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

        for epoch in range(EPOCHS):
            # Another order in every epoch, the same on all ranks. The last batch is smaller; it is not dropped.
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
            batches = order.to(device).split(BATCH)
            sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
            for index, batch in enumerate(batches):
                # Contiguous slices whose sizes differ by at most one: no sample is repeated to make them even.
                own = batch.tensor_split(world_size)[rank]
                loss = F.cross_entropy(ddp(images[own]), labels[own], reduction="sum")
                optimizer.zero_grad()
                # DDP averages over ranks. Times world_size that is a sum, which the batch's size divides.
                (loss * world_size / len(batch)).backward()
                optimizer.step()
                sums[index] = loss.detach()

            # The losses are added up over ranks here, once an epoch: in the loop it would hold up every update.
            dist.all_reduce(sums)
            losses += [total / len(batch) for total, batch in zip(sums.tolist(), batches, strict=True)]

        top1 = evaluate(model, rank, world_size, device)
        del ddp  # before its process group
        time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
        dist.destroy_process_group()
        return losses, top1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    world_size = parser.parse_args().ranks
    ray.init(log_to_driver=False)
    gpu = {"GPU": 1} if ray.cluster_resources().get("GPU", 0) >= world_size else {}
    group = placement_group([{"CPU": 1, **gpu}] * world_size, STRATEGY)
    if not group.wait(60):
        has = ray.available_resources()
        sys.exit(f"no place for {world_size} ranks: Ray has {has.get('CPU', 0)} CPUs and {has.get('GPU', 0)} GPUs free")
    places = [PlacementGroupSchedulingStrategy(group, index) for index in range(world_size)]
    ranks = [Rank.options(num_cpus=1, num_gpus=len(gpu), scheduling_strategy=place).remote() for place in places]
    address = ray.get(ranks[0].address.remote(), timeout=300)
    results = [actor.train.remote(rank, world_size, address) for rank, actor in enumerate(ranks)]
    running = results
    while running:
        ended, running = ray.wait(running, timeout=LONGEST)
        ray.get(ended or running, timeout=60)  # raises what the first rank that failed raised
    losses, top1 = ray.get(results[0])
    for update, loss in enumerate(losses):
        print(f"update {update} loss {loss}")
    print(f"top1 {top1}")
    ray.shutdown()


if __name__ == "__main__":
    main()
