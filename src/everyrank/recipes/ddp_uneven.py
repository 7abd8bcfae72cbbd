"""DDP on streams of different lengths, which nobody knows before: torch's Join, with each sample weighing the same.

Run: torchrun --standalone --nproc-per-node 2 ddp_uneven.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs; in each update
          a flag of each rank, whether it has ended; at the end of an epoch the model and the momentum, from one rank
Use when  each rank reads what only it has (a queue, files given to ranks whole), and ranks do not end together

Without Join the ranks that go on wait for those that have ended, until the timeout. In it they go along: DDP's hook
joins every all-reduce with zeros. Two things are still wrong then, and no error says so:
- DDP divides by the number of ranks (by those that are left, with divide_by_initial_world_size=False). Both weigh
  samples by who reads them, once batches differ in size. Here [sum, count] of the loss rides in DDP's own bucket, as
  the gradient of a parameter of two zeros, and gradients are divided by the count: each sample weighs the same.
- When all have ended DDP hands on the model, but not the momentum: a rank that ended early has an old one, and in the
  next epoch the replicas part. The second join hook here hands it on. (ZeroRedundancyOptimizer can be joined, too.)

What to change for your own training:
- own_stream() is your source. Each rank needs one batch at least, and an update has what there is: late ones are small.
- Join([...], throw_on_early_termination=True) ends an epoch for all ranks with the first stream that ends.
- FSDP has no join hook: there a rank that has ended goes on with a sample of weight zero, until all ranks have.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from digits import build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples of an update while all ranks have some, over all of them together
SEED = 0


class WithTotals(nn.Module):
    """A network, and the two zeros whose gradient is [sum, count] of the loss."""

    def __init__(self, network):
        super().__init__()
        self.network, self.totals = network, nn.Parameter(torch.zeros(2))

    def forward(self, images):
        return self.network(images)


class SameMomentum(Joinable, JoinHook):
    """At the end of a Join: the momentum of a rank that has made all updates, on every rank."""

    def __init__(self, optimizer, device):
        super().__init__()
        self.optimizer, self.device = optimizer, device

    def join_hook(self, **_):
        return self

    @property
    def join_device(self):
        return self.device

    @property
    def join_process_group(self):
        return dist.group.WORLD

    def main_hook(self):
        """While others go on: nothing."""

    def post_hook(self, is_last_joiner):
        source = torch.tensor(dist.get_rank() if is_last_joiner else -1, device=self.device)
        dist.all_reduce(source, dist.ReduceOp.MAX)
        self.source = int(source)
        for parameter in self.optimizer.param_groups[0]["params"]:
            dist.broadcast(self.optimizer.state[parameter]["momentum_buffer"], self.source)


def own_stream(data, rank, world_size, epoch):
    """Batches of this rank, as many as come: rank 1 has twice as much as rank 0, rank 2 three times as much."""
    borders = [len(data) * index * (index + 1) // (world_size * (world_size + 1)) for index in range(world_size + 1)]
    local = torch.arange(borders[rank], borders[rank + 1])
    order = torch.randperm(len(local), generator=torch.Generator().manual_seed(SEED + epoch))
    for numbers in local[order].split(BATCH // world_size):
        yield data[numbers]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_data, eval_data = load(dtype)
    model = WithTotals(build()).to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    parameters = list(model.network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    momentum = SameMomentum(optimizer, device)

    for epoch in range(EPOCHS):
        losses = []
        with Join([ddp, momentum]):
            for images, labels in own_stream(train_data, rank, world_size, epoch):
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                loss = F.cross_entropy(ddp(images), labels, reduction="sum")
                local = torch.stack([loss.detach(), loss.new_tensor(len(labels))])
                ddp.zero_grad()
                (loss + model.totals @ local).backward()
                # Both came as the sum over ranks / world_size, so that goes out again: what is left is sum / count.
                (total, count), model.totals.grad = model.totals.grad, None
                for parameter in parameters:
                    parameter.grad /= count
                optimizer.step()
                losses.append(total / count)

        # Whoever made all updates has all losses.
        number = torch.tensor(len(losses), device=device)
        dist.broadcast(number, momentum.source)
        losses = torch.stack(losses) if rank == momentum.source else torch.empty(number, device=device, dtype=dtype)
        dist.broadcast(losses, momentum.source)
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp, momentum  # before their process group
    time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
