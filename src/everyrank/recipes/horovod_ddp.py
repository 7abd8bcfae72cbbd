"""Distributed data parallel with Horovod: horovodrun starts the ranks, and its optimizer all-reduces the gradients.

Run: horovodrun -np 2 --gloo python horovod_ddp.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: summed over ranks by all-reduce while backward still runs, several in one message
Use when       your cluster has Horovod and starts jobs with horovodrun

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks. For batch norm use hvd.SyncBatchNorm.
- Use op=hvd.Sum, and divide the loss by the size of the whole batch. With the default, an average, samples have
  different weights if ranks have different numbers of samples or of masked targets.
- After rank 0 has read a checkpoint, call hvd.broadcast_parameters and hvd.broadcast_optimizer_state(optimizer, 0). Do
  not call the second for a new optimizer: it would make a step, which decays weights and counts as Adam's first.
- For gradient accumulation, pass backward_passes_per_step=N. Only the last of N backwards sends.
- --fp16 halves the communication. It rounds gradients to 11 bits, so it is close to float32 but not equivalent.
- On several hosts, use horovodrun -np 8 -H a:4,b:4, which starts the ranks by ssh.
- Do not name your script horovod.py: it would import itself.
"""

import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    parser.add_argument("--fp16", action="store_true", help="send gradients as fp16")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    hvd.init()  # horovodrun passes ranks and addresses in the environment
    rank, world_size = hvd.rank(), hvd.size()
    cuda = torch.cuda.device_count() >= hvd.local_size()  # one GPU per rank
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(
        max(1, os.cpu_count() // hvd.local_size())
    )  # by default each rank starts a thread for every core

    train_data, eval_data = load(dtype)
    sampler = DistributedBatchSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all ranks start with rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16 else hvd.Compression.none,
        op=hvd.Sum,
    )

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for (images, labels), batch_size in zip(loader, sampler.batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum") / batch_size
            loss.backward()  # the losses of all ranks add up to the mean over the batch
            optimizer.step()  # waits until all gradients are summed
            losses.append(loss.detach())

        losses = hvd.allreduce(torch.stack(losses), op=hvd.Sum, name="losses")  # once per epoch
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    correct = count_correct(model, eval_data, device, rank, world_size)
    correct = hvd.allreduce(correct, op=hvd.Sum, name="correct")
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
