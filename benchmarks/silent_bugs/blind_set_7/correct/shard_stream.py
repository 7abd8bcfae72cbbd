"""Regression from a stream of sensor files, read by several loader workers on every process."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NUM_FILES, ROWS, FEATURES = 32, 40, 20
BATCH, STEPS, WORKERS = 16, 150, 2


def read_file(k):
    """Stands for one file on disk."""
    g = torch.Generator().manual_seed(10_000 + k)
    w = torch.randn(FEATURES, generator=torch.Generator().manual_seed(6))
    x = torch.randn(ROWS, FEATURES, generator=g)
    y = torch.tanh(x @ w / 3) + 0.1 * torch.randn(ROWS, generator=g)
    return x, y


class SensorStream(IterableDataset):
    def __init__(self, files, rank, world, seed):
        self.files, self.rank, self.world, self.seed = files, rank, world, seed

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part, parts = self.rank * workers + worker, self.world * workers
        epoch = 0
        while True:
            g = torch.Generator().manual_seed(self.seed + epoch)       # the same on all readers
            order = torch.randperm(len(self.files), generator=g).tolist()
            rows = torch.Generator().manual_seed(self.seed + 7919 * (epoch + 1) + part)
            for i in order[part::parts]:
                x, y = read_file(self.files[i])
                for r in torch.randperm(len(y), generator=rows).tolist():
                    yield x[r], y[r]
            epoch += 1


@torch.no_grad()
def validate(model, files, rank, world):
    model.eval()
    sums = torch.zeros(2)
    for k in files[rank::world]:
        x, y = read_file(k)
        sums += torch.tensor([(model(x).squeeze(1) - y).pow(2).sum().item(), len(y)])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_files = list(range(NUM_FILES))
    val_files = list(range(NUM_FILES, NUM_FILES + 5))

    torch.manual_seed(2)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    loader = DataLoader(SensorStream(train_files, rank, world, seed=40), batch_size=BATCH, num_workers=WORKERS)
    window = []
    for step, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        window.append(loss.detach())
        if step % 30 == 0:
            mean = torch.stack(window).mean()
            window.clear()
            dist.all_reduce(mean)
            val = validate(model, val_files, rank, world)
            if rank == 0:
                print(f"step {step}  train {mean.item() / world:.4f}  val {val:.4f}")
        if step == STEPS:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
