"""Uneven inputs with the Join context: rank 1 has two batches fewer, nobody waits for ever."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def dataset(n=272):
    g = torch.Generator().manual_seed(18)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, torch.stack([x[:, :5].sum(1), x[:, 5:].prod(1)], 1))


def shard(data, rank, world, batch_size):
    """Files of different size: rank r has (world - r) shares and one share is two batches."""
    per = [8 * batch_size + (world - 1 - r) * 2 * batch_size for r in range(world)]
    begin = sum(per[:rank])
    return Subset(data, range(begin, min(begin + per[rank], len(data))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    local = shard(dataset(), rank, world, 14)
    g = torch.Generator().manual_seed(rank)
    loader = DataLoader(local, batch_size=14, shuffle=True, generator=g, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        seen = 0
        with Join([model], divide_by_initial_world_size=False):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.smooth_l1_loss(model(x), y)
                loss.backward()
                optimizer.step()
                seen += len(x)
        counts = torch.tensor(float(seen))
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {int(counts)} samples, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
