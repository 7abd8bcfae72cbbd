"""Distributed data parallel in Ray actors: Ray places an actor for each rank, and the actors form a process group.

Run: python ray_actors.py --ranks 2

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       your cluster starts jobs with Ray, or the training is a part of a larger Ray program

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks.
- ray.init() uses the cluster in RAY_ADDRESS or on this node, or starts one. Do not name a script ray.py.
- On several nodes, all need script and data at the same path: on shared storage, or by
  ray.init(runtime_env={"working_dir": "."}). Set GLOO_SOCKET_IFNAME by {"env_vars": {...}} in runtime_env.
- Each actor sees only its own GPU, as cuda:0. If there are fewer GPUs than ranks, all ranks train on CPUs.
- Ray does not restart actors here, because a rank cannot join a running process group. To recover from a failure, load
  a checkpoint in train() and start the script again.
"""

import argparse
import socket
import sys
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
STRATEGY = "PACK"  # as few nodes as possible; "STRICT_SPREAD" uses a different node for each rank
MAX_SECONDS = 24 * 3600  # a longer training fails


@ray.remote
class Rank:
    """A rank, in a process that Ray starts on a node of its cluster."""

    def address(self):
        """Return the address of this rank's node, with a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, rank, world_size, address, dtype):
        """Train, and return the losses of each epoch, and top1."""
        cuda = bool(ray.get_gpu_ids())
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        # The timeout ends the wait for a rank that died.
        backend, device_id = ("nccl", device) if cuda else ("gloo", None)
        dist.init_process_group(backend, address, timedelta(minutes=5), world_size, rank, device_id=device_id)
        all_losses = []

        train_data, eval_data = load(dtype)
        sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
        loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
        model = build().to(device, dtype)
        ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)  # without it, every epoch has the same order
            losses = []
            for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                optimizer.zero_grad()
                loss = F.cross_entropy(ddp(images), labels, reduction="sum") / batch_size
                (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
                optimizer.step()
                losses.append(loss.detach())

            losses = torch.stack(losses)
            dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
            all_losses.append(losses.cpu())

        correct = count_correct(model, eval_data, device, rank, world_size)
        dist.all_reduce(correct)
        del ddp  # DDP has to be freed before its process group is destroyed
        dist.destroy_process_group()
        return all_losses, correct.item() / len(eval_data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    world_size, dtype = args.ranks, torch.float64 if args.float64 else torch.float32
    ray.init(log_to_driver=False)
    gpu = {"GPU": 1} if ray.cluster_resources().get("GPU", 0) >= world_size else {}
    group = placement_group([{"CPU": 1, **gpu}] * world_size, STRATEGY)
    if not group.wait(60):
        free = ray.available_resources()
        sys.exit(f"cannot place {world_size} ranks: {free.get('CPU', 0)} CPUs and {free.get('GPU', 0)} GPUs are free")
    bundles = [PlacementGroupSchedulingStrategy(group, index) for index in range(world_size)]
    ranks = [Rank.options(num_cpus=1, num_gpus=len(gpu), scheduling_strategy=bundle).remote() for bundle in bundles]
    address = ray.get(ranks[0].address.remote(), timeout=300)
    results = [actor.train.remote(rank, world_size, address, dtype) for rank, actor in enumerate(ranks)]
    running = results
    while running:
        ended, running = ray.wait(running, timeout=MAX_SECONDS)
        ray.get(ended or running, timeout=60)  # raises the exception of the first failed rank
    losses, top1 = ray.get(results[0])
    for epoch, epoch_losses in enumerate(losses):
        print_losses(epoch, epoch_losses, every_update=args.float64)
    print(f"top1 {top1:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
