"""Elastic training (torchrun --max-restarts): after a rank dies, all ranks restart and resume from a checkpoint.

Run: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
Run: torchrun --standalone --nproc-per-node 2 --max-restarts 3 elastic_torchrun.py --fail-at 25

With --fail-at 25, rank 1 kills itself once, at update 25. torchrun restarts all ranks. The losses stay the same.

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs; after a
               restart, the checkpoint, which rank 0 broadcasts
Use when       hosts come and go (spot instances), or a run is so long that a host will probably fail

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks, so that their number may change.
- On several hosts, use --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id 7 on each host. If a host
  leaves, two or more others continue. If a host joins, all restart from the checkpoint.
- Keep CHECKPOINT on storage that all hosts share, because rank 0 may be on a different host after a restart.
- Add all other state to the checkpoint: learning-rate schedule, GradScaler, random generators.
- Export the variable above, which gives each restart a new store. torchrun's own store outlives the ranks: new ranks
  would find addresses of dead ranks in it, and fail or hang (pytorch issue 135712).
- A restart repeats the updates after the last checkpoint. If the script itself fails, --max-restarts limits restarts.
"""

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
EVERY = 10  # updates between two checkpoints
CHECKPOINT = Path("elastic.pt")  # the script removes it at the end; the next run would resume from it


class ResumableSampler(DistributedBatchSampler):
    """A DistributedBatchSampler over all epochs, which can start in the middle of an epoch."""

    first_update = 0  # counted from the first epoch

    def __iter__(self):
        first_epoch, first_batch = divmod(self.first_update, len(self.batch_sizes))
        for epoch in range(first_epoch, EPOCHS):
            self.set_epoch(epoch)
            yield from islice(super().__iter__(), first_batch if epoch == first_epoch else 0, None)


def save(**state):
    """Write to a temporary name and rename it, so that CHECKPOINT is complete at any time."""
    partial = CHECKPOINT.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(CHECKPOINT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-at", type=int, help="rank 1 dies at this update, the first time")
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    fail_at = args.fail_at if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        sys.exit("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun: else ranks hang after a restart")
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    sampler = ResumableSampler(len(train_data), BATCH, rank, world_size)
    losses = torch.zeros(EPOCHS * len(sampler.batch_sizes), dtype=torch.float64, device=device)

    # Rank 0 reads the checkpoint and sends it, because ranks that read different files would wait for each other.
    checkpoints = [torch.load(CHECKPOINT, "cpu", weights_only=True) if rank == 0 and CHECKPOINT.exists() else None]
    dist.broadcast_object_list(checkpoints)
    (checkpoint,) = checkpoints
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        losses.copy_(checkpoint["losses"])
        sampler.first_update = checkpoint["updates"]
        print(f"rank {rank} of {world_size} resumes from update {sampler.first_update}", file=sys.stderr)

    num_saved = sampler.first_update
    loader = DataLoader(train_data, batch_sampler=sampler, pin_memory=cuda)
    for update, (images, labels) in enumerate(loader, sampler.first_update):
        if update == fail_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        batch_size = sampler.batch_sizes[update % len(sampler.batch_sizes)]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(images), labels, reduction="sum") / batch_size
        (loss * world_size).backward()  # DDP divides the sum over ranks by world_size
        optimizer.step()
        losses[update] = loss.detach()
        if (update + 1) % EVERY == 0 or update + 1 == len(losses):
            dist.all_reduce(losses[num_saved : update + 1])  # earlier losses are already summed over ranks
            num_saved = update + 1
            if rank == 0:
                save(model=model.state_dict(), optimizer=optimizer.state_dict(), losses=losses, updates=num_saved)

    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        for epoch, epoch_losses in enumerate(losses.view(EPOCHS, -1)):
            print_losses(epoch, epoch_losses, every_update=args.float64)
        print(f"top1 {correct.item() / len(eval_data):.4f}")
        CHECKPOINT.unlink()
    del ddp  # DDP has to be freed before its process group is destroyed
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
