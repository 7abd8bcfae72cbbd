"""DDP with compressed gradients: rounded to 16 bits, or as products of two narrow matrices (PowerSGD).

Run: torchrun --standalone --nproc-per-node 2 ddp_compressed.py

Memory         as in DDP; with powersgd also an error and two narrow matrices for each gradient, on every rank
Communication  gradients in 16 bits, half of float32; with powersgd, RANK * (n + m) elements for a matrix (n, m)
Use when       the network, not the device, limits the speed, and the loss curve is as good as with --hook none

It is not equivalent to DDP, because compression changes the gradients.

What to change for your own training:
- fp16 overflows above 65,504, and values below 6e-8 become 0. bf16 has the range of float32; its hook needs NCCL.
- The first START updates use the plain all-reduce, then powersgd starts. torch's default is 1,000 updates.
- Save the hook's state in a checkpoint, too (PowerSGDState can be pickled). Otherwise its errors restart from zero.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
RANK = 2  # columns of the matrices that powersgd sends
START = 3  # updates before powersgd starts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    parser.add_argument("--hook", choices=["fp16", "powersgd", "none"], default="fp16", help="compression of gradients")
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
    if args.hook == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif args.hook == "powersgd":  # with error feedback: the error is added to the next gradient
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=START)
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        ddp.register_comm_hook(None, allreduce_hook)
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
