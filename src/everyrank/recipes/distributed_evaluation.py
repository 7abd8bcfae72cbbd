"""Distributed evaluation: all ranks evaluate, and each sample counts once, with any number of ranks.

Run: torchrun --standalone --nproc-per-node 2 distributed_evaluation.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs; for each
               evaluation, one all-reduce of three sums: loss, correct images, images
Use when       the evaluation set is so large that one rank should not read it while the others wait

What to change for your own training:
- Add an entry to totals for each sum of yours. Divide after the all-reduce: a mean of the means of the ranks is wrong
  if ranks read different numbers of samples.
- Do not use DistributedSampler. It repeats samples until all ranks have equally many, and these count twice.
- Call model(...), not ddp(...). Ranks may read different numbers of batches, and must not wait for each other.
- If a metric is not a sum (AUC, a median), gather the outputs and compute it on rank 0.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from digits import DistributedBatchSampler, build, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


@torch.no_grad()
def evaluate(model, data, rank, world_size, device):
    """Return (loss, top1, number of samples) over all of `data`. All ranks must call it."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # float64: exact for counts up to 2^53
    # One rank reads each image. Some ranks read one image more than others, and no image is repeated.
    subset = Subset(data, range(rank, len(data), world_size))
    for images, labels in DataLoader(subset, BATCH):
        output, labels = model(images.to(device)), labels.to(device)
        totals[0] += F.cross_entropy(output, labels, reduction="sum")
        totals[1] += (output.argmax(1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    model.train()
    loss, correct, count = totals.tolist()
    return loss / count, correct / count, int(count)


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
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    eval_loss, top1, count = evaluate(model, eval_data, rank, world_size, device)
    if rank == 0:
        print(f"eval_samples {count}")
        print(f"eval_loss {eval_loss if args.float64 else round(eval_loss, 4)}")
        print(f"top1 {top1:.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
