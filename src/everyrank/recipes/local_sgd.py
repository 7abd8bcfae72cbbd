"""Local SGD and parameter averaging: ranks train replicas separately and average their parameters every few updates.

Run: torchrun --standalone --nproc-per-node 2 local_sgd.py

With --every 1 it averages after every update, which is called parameter averaging.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  parameters and momentum, in one all-reduce every few updates (with --every 1, twice as much as DDP, and
               not overlapped with backward)
Use when       the network is too slow for an all-reduce in every update. Use --every 1 only to see why DDP averages
               gradients

It is not equivalent to DDP, because between two averages each rank makes its own steps. With --every 1 and SGD, also
with momentum and weight decay, it is equivalent: the average of the ranks' steps is the step along the average
gradient. Adam is different, because its steps are not linear in the gradient. Batch norm, clipping and dropout differ,
too.

What to change for your own training:
- Start with DDP or --every 1, and increase --every later: early in training, replicas diverge quickly.
- num_samples counts the samples of a rank since the last average. With masked targets, count loss terms instead.
- Save and evaluate after an average. Between averages, every rank has a different model.
- Average the optimizer state, too. Otherwise ranks would differ after an uneven last batch.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


@torch.no_grad()
def average(model, optimizer, weight):
    """Replace parameters and momentum by their average over ranks, weighted by each rank's `weight`."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors = [*model.parameters(), *states]
    # One vector needs only one all-reduce. Its last element becomes the sum of the weights.
    flat = torch.cat([*(tensor.reshape(-1) for tensor in tensors), weight.new_ones(1)]) * weight
    dist.all_reduce(flat)
    averages = (flat[:-1] / flat[-1]).split([tensor.numel() for tensor in tensors])
    for tensor, value in zip(tensors, averages, strict=True):
        tensor.copy_(value.view_as(tensor))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    parser.add_argument("--every", type=int, default=4, metavar="N", help="updates between two averages")
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
    model = build().to(device, dtype)  # seeded, so all ranks start with the same weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    num_samples, updates = torch.zeros((), dtype=dtype, device=device), 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)  # the mean over the samples of this rank
            loss.backward()
            optimizer.step()
            losses.append(loss.detach() * len(labels) / batch_size)
            num_samples += len(labels)
            updates += 1
            if updates % args.every == 0 or updates == EPOCHS * len(loader):
                average(model, optimizer, num_samples)
                num_samples.zero_()

        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
