"""DDP with gradient accumulation: several micro-batches per update, for a batch that is too large for the devices.

Run: torchrun --standalone --nproc-per-node 2 ddp_accumulate.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, only in the last micro-batch
Use when       the activations of the batch do not fit on the devices together

What to change for your own training:
- Increase ACCUMULATE to use less memory. The losses stay the same, because BATCH does not change.
- Divide by the size of the whole batch. A mean over each micro-batch, divided by ACCUMULATE, is not equivalent
  if micro-batches differ in size or in the number of masked targets.
- With batch norm, accumulation is not equivalent, because each micro-batch has its own statistics.
"""

import argparse
import os
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
ACCUMULATE = 4  # micro-batches of one update


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
            optimizer.zero_grad()
            loss = torch.zeros((), dtype=dtype, device=device)
            micro_batches = list(zip(images.tensor_split(ACCUMULATE), labels.tensor_split(ACCUMULATE), strict=True))
            for index, (inputs, targets) in enumerate(micro_batches):
                is_last = index + 1 == ACCUMULATE
                # The last micro-batch sends the gradients of all of them. no_sync() has to enclose the forward pass,
                # where DDP decides whether backward will send.
                with nullcontext() if is_last else ddp.no_sync():
                    output = ddp(inputs.to(device, non_blocking=True))
                    targets = targets.to(device, non_blocking=True)
                    micro_loss = F.cross_entropy(output, targets, reduction="sum") / batch_size
                    (micro_loss * world_size).backward()  # DDP divides the sum over ranks by world_size
                loss += micro_loss.detach()
            optimizer.step()
            losses.append(loss)

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
