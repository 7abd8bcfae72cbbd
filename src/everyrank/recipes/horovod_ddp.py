"""Distributed data parallel with Horovod: its own ranks, its own all-reduce, and an optimizer that sums gradients.

Run: horovodrun -np 2 --gloo python horovod_ddp.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  each gradient: summed over ranks by all-reduce while backward still runs, several at once when ready
Use when       your cluster has Horovod, and horovodrun is how jobs start on it

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is that of all ranks. Batch norm needs hvd.SyncBatchNorm.
- op=hvd.Sum, and the loss over the size of the whole batch. The default averages: the last batch, of which ranks have
  unequal parts, then weighs wrongly, and so do masked targets.
- After rank 0 has read a checkpoint: hvd.broadcast_parameters, and hvd.broadcast_optimizer_state(optimizer, 0). Not for
  a new optimizer: to have a state to send, that makes a step, which decays the weights and counts as Adam's first.
- Several backwards in an update: backward_passes_per_step=N, and only the last of them sends.
- --fp16 sends half the bytes, and rounds each gradient to 11 bits: another training, if a close one.
- On several hosts: horovodrun -np 8 -H a:4,b:4, which reaches them by ssh.
- Do not call your script horovod.py: it would import itself.
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
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    parser.add_argument("--fp16", action="store_true", help="send gradients as fp16")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    hvd.init()  # ranks and addresses come from horovodrun, in the environment
    rank, world_size = hvd.rank(), hvd.size()
    cuda = torch.cuda.is_available()
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
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with rank 0's weights
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
            loss.backward()  # the sum of this over the ranks is the mean over the batch
            optimizer.step()  # waits for the sums of all gradients
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
