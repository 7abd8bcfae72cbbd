"""Distributed data parallel in Ray actors: Ray places one for each rank, and they form a process group of their own.

Run: python ray_actors.py --ranks 2

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when  Ray is how jobs start on your cluster, or the training is one part of a larger Ray program

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
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0
STRATEGY = "PACK"  # on as few nodes as it can; "STRICT_SPREAD" puts each rank on another
LONGEST = 24 * 3600  # seconds of training, after which a rank that says nothing is given up


def load(dtype):
    """Real handwritten digits for training and, every fifth, held out: images (1, 8, 8) from 0 to 1, and labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    images, labels = (rows[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), rows[:, 64]
    held_out = torch.arange(len(rows)) % 5 == 4
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


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
def evaluate(model, data, rank, world_size, device):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(rank, len(data), world_size))  # DistributedSampler would count some images twice
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


@ray.remote
class Rank:
    """A process that Ray starts, somewhere in its cluster."""

    def address(self):
        """Where this rank can listen: the node it is on, and a port that is free there now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, rank, world_size, address, dtype):
        """The losses of all updates, and top1."""
        cuda = bool(ray.get_gpu_ids())
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        # The timeout ends the wait for a rank that died.
        name, bound = ("nccl", device) if cuda else ("gloo", None)
        dist.init_process_group(name, address, timedelta(minutes=5), world_size, rank, device_id=bound)
        all_losses = []

        train_data, held_out = load(dtype)
        # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
        sampler = DistributedSampler(train_data, seed=SEED)
        loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
        num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
        model = build().to(device, dtype)
        ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)  # else every epoch has the order of the first
            losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
            for index, (images, labels) in enumerate(loader):
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                loss = F.cross_entropy(ddp(images), labels, reduction="none")
                loss = loss[: num_own - index * loader.batch_size].sum()  # a repeated sample would count twice
                size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
                optimizer.zero_grad()
                # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
                (loss * world_size / size).backward()
                optimizer.step()
                losses[index] = loss.detach() / size

            # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
            dist.all_reduce(losses)
            all_losses += losses.tolist()

        top1 = evaluate(model, held_out, rank, world_size, device)
        del ddp  # before its process group
        dist.destroy_process_group()
        return all_losses, top1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    args = parser.parse_args()
    world_size, dtype = args.ranks, torch.float64 if args.float64 else torch.float32
    if BATCH % world_size:
        parser.error(f"--ranks {world_size}: must divide BATCH={BATCH}")
    ray.init(log_to_driver=False)
    gpu = {"GPU": 1} if ray.cluster_resources().get("GPU", 0) >= world_size else {}
    group = placement_group([{"CPU": 1, **gpu}] * world_size, STRATEGY)
    if not group.wait(60):
        has = ray.available_resources()
        sys.exit(f"no place for {world_size} ranks: Ray has {has.get('CPU', 0)} CPUs and {has.get('GPU', 0)} GPUs free")
    places = [PlacementGroupSchedulingStrategy(group, index) for index in range(world_size)]
    ranks = [Rank.options(num_cpus=1, num_gpus=len(gpu), scheduling_strategy=place).remote() for place in places]
    address = ray.get(ranks[0].address.remote(), timeout=300)
    results = [actor.train.remote(rank, world_size, address, dtype) for rank, actor in enumerate(ranks)]
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
