"""Logistic regression over a stream of shards of very different sizes.

Every (rank, worker) pair reads its own shards, so ranks run out at different
times and the last batches are small. Each step uses the gradient of the mean
over all samples that are present anywhere in that step.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

SHARD_SIZES = [70, 10, 45, 90, 33, 5, 61, 24]
DIM = 8


class Shards(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.true_w = torch.linspace(-2, 2, DIM)

    def samples(self, shard):
        g = torch.Generator().manual_seed(900 + shard)
        for _ in range(SHARD_SIZES[shard]):
            x = torch.randn(DIM, generator=g)
            y = (torch.rand((), generator=g) < torch.sigmoid(x @ self.true_w)).float()
            yield x, y

    def __iter__(self):
        info = get_worker_info()
        n_workers = info.num_workers if info else 1
        worker = info.id if info else 0
        first = self.rank * n_workers + worker
        for shard in range(first, len(SHARD_SIZES), self.world * n_workers):
            yield from self.samples(shard)


def endless_none(loader):
    yield from loader
    while True:
        yield None


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    weight = torch.zeros(DIM, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    params = [weight, bias]
    optimizer = torch.optim.SGD(params, lr=1.0)
    loader = DataLoader(Shards(rank, world), batch_size=16, num_workers=2)

    for epoch in range(3):
        seen, loss_total = 0, 0.0
        batches = endless_none(loader)
        while True:
            batch = next(batches)
            n = 0 if batch is None else len(batch[1])
            if n:
                x, y = batch
                loss_sum = F.binary_cross_entropy_with_logits(x @ weight + bias, y, reduction="sum")
            else:
                loss_sum = 0.0 * (weight.sum() + bias.sum())
            optimizer.zero_grad()
            loss_sum.backward()

            stats = torch.tensor([n, loss_sum.item()], dtype=torch.float64)
            dist.all_reduce(stats)
            if stats[0] == 0:
                break
            for p in params:
                dist.all_reduce(p.grad)
                p.grad /= stats[0].item()
            optimizer.step()
            seen += int(stats[0])
            loss_total += stats[1].item()
        if rank == 0:
            print(f"epoch {epoch}: bce {loss_total / seen:.5f} on {seen} of {sum(SHARD_SIZES)}")

    if rank == 0:
        print("weights", [round(w, 3) for w in weight.tolist()], "bias", round(bias.item(), 3))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
