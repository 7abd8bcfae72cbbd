"""DDP with batch norm: the statistics are those of the batch of all ranks, so that their number changes nothing.

Run: torchrun --standalone --nproc-per-node 2 ddp_syncbn.py

Holds     the whole model, its gradients and the optimizer state, on every rank
Travels   the gradients, as under any DDP; for each batch norm, forward and backward, two numbers a channel
Use when  the model has batch norm: on each rank's samples alone, every number of ranks is another training

DDP leaves batch norm alone: each rank normalises by its own samples, and the running statistics are those of rank 0.
nn.SyncBatchNorm takes them over all ranks, on GPUs only: on CPU it raises. BatchNormOverRanks is the same on CPU.

What to change for your own training:
- load() and build() are your data and your network. BatchNorm1d and 3d: other dimensions in BatchNormOverRanks.
- BATCH is the batch of all ranks. A rank of 32 samples and more trains well without any of this, but differently.
- What DistributedSampler repeats must not get into the statistics: cut it off before the forward, not in the loss.
- Every rank has to call every batch norm in the same order: one that skips a layer leaves the others waiting.
"""

import argparse
import csv
import gzip
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all ranks together: it does not change with their number
SEED = 0


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks. The losses of all ranks depend on it, so its gradient is summed over them, too."""

    @staticmethod
    def forward(_, own):
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class BatchNormOverRanks(nn.BatchNorm2d):
    """What nn.SyncBatchNorm is on CUDA. Ranks may have different numbers of images, or none."""

    def forward(self, images):
        if not self.training:
            return super().forward(images)  # by the running statistics
        own_count = images.new_tensor([images[:, 0].numel()])
        *_, count = total = SumOverRanks.apply(torch.cat([images.sum((0, 2, 3)), own_count]))
        mean = total[:-1] / count
        centred = images - mean[:, None, None]
        # Sums of squares, less the mean's square, would need one all-reduce less, and lose digits.
        squares = SumOverRanks.apply(centred.square().sum((0, 2, 3)))
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(squares / (count - 1), self.momentum)  # unbiased, as in every batch norm
        scale = self.weight * (squares / count + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


def synchronise(model, cuda):
    """The model with its batch norms over all ranks; parameters, buffers and their names stay."""
    if cuda:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = BatchNormOverRanks  # another forward, and nothing else
    return model


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
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH % world_size:
        raise SystemExit(f"BATCH={BATCH}: {world_size} ranks must divide it")

    train_data, held_out = load(dtype)
    # Rank r reads samples r, r + world_size, ... of the order; a few are repeated at its end, to make ranks even.
    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, BATCH // world_size, sampler=sampler, pin_memory=cuda)
    num_own = len(range(rank, len(train_data), world_size))  # without the repeated ones
    model = synchronise(build(), cuda).to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            # A repeated sample would count twice, in the loss and in the statistics; without it there may be none.
            own = slice(max(0, num_own - index * loader.batch_size))
            images, labels = images[own].to(device, non_blocking=True), labels[own].to(device, non_blocking=True)
            loss = F.cross_entropy(ddp(images), labels, reduction="sum")
            size = min(BATCH, len(train_data) - index * BATCH)  # of the batch of all ranks: the last is smaller
            optimizer.zero_grad()
            # DDP averages gradients over ranks: times world_size that is their sum, over the size their mean.
            (loss * world_size / size).backward()
            optimizer.step()
            losses[index] = loss.detach() / size

        # The losses are added up over ranks here, once an epoch: in the loop every update would wait for it.
        dist.all_reduce(losses)
        if rank == 0:
            for index, loss in enumerate(losses.tolist()):
                print(f"update {epoch * len(loader) + index} loss {loss}")

    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    del ddp  # before its process group
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
