import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """Sixteen shards of synthetic rows; the epoch lives in shared memory for persistent workers."""

    def __init__(self, rank, world, shards=16, rows=8):
        self.rank, self.world, self.shards, self.rows = rank, world, shards, rows
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        epoch = int(self.epoch)
        g = torch.Generator().manual_seed(epoch)
        order = torch.randperm(self.shards, generator=g).tolist()  # equal on all ranks
        for shard in order[self.rank :: self.world][worker::workers]:
            rows = torch.Generator().manual_seed(1000 + shard)
            x = torch.randn(self.rows, 9, generator=rows)
            yield from zip(x, x[:, :1] - x[:, 1:2] * x[:, 2:3])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dataset = Shards(rank, dist.get_world_size())
    loader = DataLoader(dataset, batch_size=16, num_workers=1, persistent_workers=True)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        dataset.epoch.fill_(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
