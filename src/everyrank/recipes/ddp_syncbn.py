"""DDP with synchronized batch norm: statistics over the batch of all ranks, equivalent for any number of ranks.

Run: torchrun --standalone --nproc-per-node 2 ddp_syncbn.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients, as in DDP; for each batch norm, two numbers per channel in forward and in backward
Use when       the model has batch norm. With local statistics, each number of ranks trains a different model

With DDP only, each rank normalizes by its own samples, and the running statistics are those of rank 0.
nn.SyncBatchNorm computes statistics over all ranks, but only on GPUs. BatchNormOverRanks does the same on CPU.

What to change for your own training:
- Replace load() of digits.py, and build(). For BatchNorm1d and 3d, change the dimensions in BatchNormOverRanks.
- BATCH is the batch of all ranks. With 32 or more samples per rank, local statistics work, but are not equivalent.
- Use the sampler of digits.py. DistributedSampler repeats samples, which would count twice in the statistics.
- Call every batch norm on all ranks, in the same order. If one rank skips a layer, the others wait for it.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
SEED = 0


class SumOverRanks(torch.autograd.Function):
    """Sum a tensor over ranks. The losses of all ranks depend on it, so backward sums its gradient over ranks, too."""

    @staticmethod
    def forward(_, local):
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class BatchNormOverRanks(nn.BatchNorm2d):
    """Batch norm over all ranks on CPU, like nn.SyncBatchNorm on CUDA. Ranks may have different numbers of images."""

    def forward(self, images):
        if not self.training:
            return super().forward(images)  # uses the running statistics
        local_count = images.new_tensor([images[:, 0].numel()])
        *_, count = total = SumOverRanks.apply(torch.cat([images.sum((0, 2, 3)), local_count]))
        mean = total[:-1] / count
        centered = images - mean[:, None, None]
        # E[x^2] - mean^2 would save one all-reduce, but lose precision.
        squares = SumOverRanks.apply(centered.square().sum((0, 2, 3)))
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(squares / (count - 1), self.momentum)  # unbiased, as in every batch norm
        scale = self.weight * (squares / count + self.eps).rsqrt()
        return centered * scale[:, None, None] + self.bias[:, None, None]


def synchronize(model, cuda):
    """Return the model with synchronized batch norm, and with the same parameters, buffers and names."""
    if cuda:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = BatchNormOverRanks  # replaces only forward()
    return model


def build():
    """Return a small convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every process."""

    def block(in_channels, out_channels, stride):
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = synchronize(build(), cuda).to(device, dtype)
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
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
