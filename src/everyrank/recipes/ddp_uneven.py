"""DDP with uneven inputs (torch's Join): streams of unknown, different lengths, with the same weight for each sample.

Run: torchrun --standalone --nproc-per-node 2 ddp_uneven.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs; in each
               update, a flag from each rank that tells whether its stream has ended; after each epoch, model and
               momentum from one rank
Use when       each rank reads its own source (a queue, whole files), and the sources end after different numbers of
               batches

Without Join, the other ranks wait for a rank whose stream has ended, until the timeout. With Join, DDP's hook takes
part in each all-reduce with zeros on that rank. Two things are still wrong, without an error:
- DDP divides the summed gradients by the number of all ranks. With divide_by_initial_world_size=False, it divides by
  the number of ranks that still have data. Either way, samples of smaller batches have larger weights. This script
  divides by the number of samples. The gradient of an extra parameter is [loss sum, count], so DDP all-reduces both.
- At the end, DDP broadcasts the model but not the momentum. A rank that ended early has an old momentum, and replicas
  diverge in the next epoch. A second join hook broadcasts it. (ZeroRedundancyOptimizer has its own hook for Join.)

What to change for your own training:
- Replace local_stream() by your source. Each rank needs at least one batch. After the first stream has ended, updates
  have fewer samples.
- To end the epoch when the first stream ends, use Join([...], throw_on_early_termination=True). Each rank then raises a
  RuntimeError. Catch it. post_hook() does not run then, so broadcast the losses from rank 0.
- FSDP has no join hook. A rank whose stream has ended must continue with dummy samples of weight zero.
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
BATCH = 64  # samples per update, over all ranks, until the first stream ends
SEED = 0


class WithTotals(nn.Module):
    """A network with an extra parameter of two zeros, whose gradient is [sum, count] of the loss."""

    def __init__(self, network):
        super().__init__()
        self.network, self.totals = network, nn.Parameter(torch.zeros(2))

    def forward(self, images):
        return self.network(images)


class BroadcastMomentum(Joinable, JoinHook):
    """A join hook that broadcasts the momentum from a rank that has made all updates, at the end of Join."""

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
        """Do nothing while other ranks continue."""

    def post_hook(self, is_last_joiner):
        source_rank = torch.tensor(dist.get_rank() if is_last_joiner else -1, device=self.device)
        dist.all_reduce(source_rank, dist.ReduceOp.MAX)
        self.source_rank = int(source_rank)
        for parameter in self.optimizer.param_groups[0]["params"]:
            dist.broadcast(self.optimizer.state[parameter]["momentum_buffer"], self.source_rank)


def local_stream(data, rank, world_size, epoch):
    """Yield the batches of this rank. Rank 1 has twice as many samples as rank 0, rank 2 three times as many."""
    borders = [len(data) * index * (index + 1) // (world_size * (world_size + 1)) for index in range(world_size + 1)]
    local = torch.arange(borders[rank], borders[rank + 1])
    order = torch.randperm(len(local), generator=torch.Generator().manual_seed(SEED + epoch))
    for indices in local[order].split(BATCH // world_size):
        yield data[indices]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
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
    momentum_hook = BroadcastMomentum(optimizer, device)

    for epoch in range(EPOCHS):
        losses = []
        with Join([ddp, momentum_hook]):
            for images, labels in local_stream(train_data, rank, world_size, epoch):
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                loss = F.cross_entropy(ddp(images), labels, reduction="sum")
                sum_and_count = torch.stack([loss.detach(), loss.new_tensor(len(labels))])
                ddp.zero_grad()
                (loss + model.totals @ sum_and_count).backward()
                # DDP divided the gradients, the sum and the count by world_size, so it cancels in the divisions below.
                (loss_sum, count), model.totals.grad = model.totals.grad, None
                for parameter in parameters:
                    parameter.grad /= count
                optimizer.step()
                losses.append(loss_sum / count)

        # Only ranks that have made all updates have all losses, so one of them broadcasts.
        num_updates = torch.tensor(len(losses), device=device)
        dist.broadcast(num_updates, momentum_hook.source_rank)
        losses = (
            torch.stack(losses)
            if rank == momentum_hook.source_rank
            else torch.empty(num_updates, device=device, dtype=dtype)
        )
        dist.broadcast(losses, momentum_hook.source_rank)
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp, momentum_hook  # before the process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
