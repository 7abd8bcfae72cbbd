"""DDP with a weighted sampler: all ranks draw the same samples in proportion to weights, and each takes a part.

Run: torchrun --standalone --nproc-per-node 2 weighted_sampler.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       classes or sources are unequally frequent. torch's WeightedRandomSampler does not support ranks, and
               DistributedSampler does not support weights. One inside the other draws from a part of the data only, or
               the same samples on all ranks

What to change for your own training:
- Replace load() and build() of digits.py, and weigh(), which returns a weight for each training sample. A sample of
  weight 0 is never drawn.
- num_draws is the length of an epoch. With replacement=False it is at most the number of samples.
- All ranks draw the whole order from one seed, without communication. Any number of ranks reads the same samples.
- torch.multinomial supports up to 2**24 samples. For more, draw a class first and then one of its samples.
- Call set_epoch. Without it, all epochs draw the same samples, and the training never sees the others.
- Evaluate without weights, as count_correct does.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from digits import SEED, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


def weigh(labels):
    """Return a weight for each sample, so that all classes are drawn equally often."""
    return 1 / labels.bincount()[labels].double()


class DistributedWeightedSampler(Sampler):
    """Yields this rank's part of each batch, drawn by weight, as indices: the batch_sampler of a DataLoader."""

    def __init__(self, weights, num_draws, batch_size, rank, world_size, replacement=True):
        self.weights, self.num_draws, self.replacement = weights, num_draws, replacement
        self.rank, self.world_size, self.batch_size, self.epoch = rank, world_size, batch_size, 0
        self.batch_sizes = [min(batch_size, num_draws - start) for start in range(0, num_draws, batch_size)]
        if min(self.batch_sizes) < world_size:
            raise SystemExit(f"the last batch has {self.batch_sizes[-1]} samples for {world_size} ranks: change BATCH")

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(SEED + self.epoch)  # the same on every rank
        order = torch.multinomial(self.weights, self.num_draws, self.replacement, generator=generator)
        for batch in order.split(self.batch_size):
            yield batch.tensor_split(self.world_size)[self.rank].tolist()

    def __len__(self):
        return len(self.batch_sizes)


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
    weights = weigh(train_data.tensors[1])
    sampler = DistributedWeightedSampler(weights, len(weights), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch draws the same samples
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
