"""Distributed checkpoints: all ranks save together, and a training resumes in the middle of an epoch.

Run: torchrun --standalone --nproc-per-node 2 checkpoint_resume.py --stop 25
Run: torchrun --standalone --nproc-per-node 2 checkpoint_resume.py

The first run stops after 25 updates. The second run resumes from the last checkpoint, with any number of ranks. With
--float64 it prints the losses of a run that was never interrupted.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs. A
               checkpoint needs only small messages, because each rank writes a different part of it
Use when       a run is longer than you can afford to repeat

What to change for your own training:
- Save all state: here model, optimizer and number of updates; also learning-rate schedule and GradScaler, if any. Save
  random generators, too, unless sample order and dropout depend only on seed and update, as the order does here.
- A checkpoint gets its final name when it is complete, so that a reader never sees an incomplete one.
- torch.distributed.checkpoint unpickles the metadata of a checkpoint. Load only checkpoints that you trust.
"""

import argparse
import os
import shutil
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
SAVE_EVERY = 10  # updates between two checkpoints
FOLDER = Path("checkpoints")  # on storage that all hosts share


class ResumableSampler(DistributedBatchSampler):
    """A DistributedBatchSampler that can start in the middle of an epoch."""

    first_batch = 0

    def __iter__(self):
        return islice(super().__iter__(), self.first_batch, None)


def save(model, optimizer, updates, rank):
    """Save a checkpoint. All ranks write, then rank 0 renames the folder."""
    unfinished, final = FOLDER / "unfinished", FOLDER / f"{updates:06d}"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # a crash may have left it
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # dcp.save() returns when all ranks have written.
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(final)


def load_newest(model, optimizer, device):
    """Load the newest checkpoint into model and optimizer. Return its number of updates, 0 without a checkpoint."""
    updates = torch.tensor(max((int(path.name) for path in FOLDER.glob("*") if path.name.isdigit()), default=0))
    updates = updates.to(device)
    dist.broadcast(updates, src=0)  # rank 0 decides, because ranks that disagree would wait for each other
    if not updates:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=FOLDER / f"{updates.item():06d}")
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return updates.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop", type=int, default=10**9, metavar="N", help="stop after N updates")
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(minutes=5), device_id=device_id)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    sampler = ResumableSampler(len(train_data), BATCH, rank, world_size)
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    updates = load_newest(model, optimizer, device)

    updates_per_epoch = len(sampler.batch_sizes)
    while updates < min(args.stop, EPOCHS * updates_per_epoch):
        epoch, sampler.first_batch = divmod(updates, updates_per_epoch)
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        batch_sizes = sampler.batch_sizes[sampler.first_batch :]
        first_update, losses = updates, []
        for (images, labels), batch_size in zip(loader, batch_sizes, strict=True):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(images), labels, reduction="sum") / batch_size
            (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
            optimizer.step()
            updates += 1
            losses.append(loss.detach())
            if updates % SAVE_EVERY == 0:
                save(model, optimizer, updates, rank)
            if updates == args.stop:
                break

        losses = torch.stack(losses)
        dist.all_reduce(losses)  # once per epoch, because in the loop every update would wait for it
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64, first_update=first_update)

    if updates == EPOCHS * updates_per_epoch:
        correct = count_correct(model, eval_data, device, rank, world_size)
        dist.all_reduce(correct)
        if rank == 0:
            print(f"top1 {correct.item() / len(eval_data):.4f}")
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
