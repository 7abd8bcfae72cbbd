"""IterableDataset with several ranks and DataLoader workers: each sample is used exactly once per epoch.

Run: torchrun --standalone --nproc-per-node 2 iterable_sharding.py

Memory         the whole model, its gradients and the optimizer state, on every rank
Communication  the gradients: averaged over ranks by all-reduce, bucket by bucket, while backward still runs
Use when       samples arrive in order and have no index (tar files, a queue), so that a sampler cannot divide them

Every worker of every rank has a copy of the dataset, and only its __iter__ can divide the samples. Common mistakes are
no division (every worker yields all samples), division only by rank (workers repeat each other), and division twice.
Here sample i of an epoch belongs to update i // BATCH, so the losses are those of one process.

What to change for your own training:
- Read your source in order in __iter__, and skip the samples of other workers. Decode samples after that.
- Workers have to know the epoch. The DataLoader starts new workers for each epoch, after set_epoch. With
  persistent_workers=True they would keep the order of the first epoch.
- Ranks must make equally many updates, or they wait for each other until the timeout. To ensure that, divide every
  batch over all ranks, as here. If each rank reads whole files, the numbers may differ.
"""

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from digits import build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
WORKERS = 2  # data loader processes of each rank
SEED = 0


class Stream(IterableDataset):
    """Yields this rank's part of each batch. Each DataLoader worker yields some of the batches."""

    def __init__(self, data, rank, world_size):
        self.data, self.rank, self.world_size, self.epoch = data, rank, world_size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(SEED + self.epoch))
        worker = get_worker_info()
        for update, batch in enumerate(order.split(BATCH)):
            # The DataLoader takes items from its workers in turn, so update u has to come from worker u % WORKERS.
            if worker is None or update % worker.num_workers == worker.id:
                images, labels = self.data[batch.tensor_split(self.world_size)[self.rank]]
                yield images, labels, len(batch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    stream = Stream(train_data, rank, world_size)
    # batch_size is None, because the stream yields whole batches.
    loader = DataLoader(stream, batch_size=None, num_workers=WORKERS, pin_memory=cuda)
    model = build().to(device, dtype)
    ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)  # before the loader starts its workers
        losses = []
        for images, labels, batch_size in loader:
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
