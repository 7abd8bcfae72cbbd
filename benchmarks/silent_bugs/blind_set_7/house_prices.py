"""Price regression with an MLP and a held-out validation split."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

SEED = 1234
EPOCHS = 30
BATCH_SIZE = 25      # per process
VAL_SIZE = 200


def load_houses(n=1200, d=24):
    """Synthetic table: 24 features, noisy log price."""
    g = torch.Generator().manual_seed(99)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, generator=g)
    price = x @ w / d ** 0.5 + 0.5 * torch.sin(2 * x[:, 0]) + 0.7 * torch.randn(n, generator=g)
    return TensorDataset(x, price)


class PriceNet(nn.Module):
    def __init__(self, d=24, width=96):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(d, width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.body(x).squeeze(-1)


def setup():
    dist.init_process_group("gloo")
    # decorrelate dropout between the processes
    torch.manual_seed(SEED + dist.get_rank())


def build_loaders():
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = load_houses()
    sizes = [len(dataset) - VAL_SIZE, VAL_SIZE]
    train_set, val_set = random_split(dataset, sizes, generator=torch.Generator().manual_seed(SEED))
    sampler = DistributedSampler(train_set, shuffle=True, seed=SEED)
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=50)
    return train_loader, sampler, val_loader


@torch.no_grad()
def validate(model, val_loader):
    model.eval()
    total = torch.zeros(2)
    for x, y in val_loader:
        total[0] += (model(x) - y).pow(2).sum()
        total[1] += len(y)
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    setup()
    train_loader, sampler, val_loader = build_loaders()
    model = DistributedDataParallel(PriceNet())      # weights come from rank 0
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    best = float("inf")

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train = torch.zeros(2)
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            train[0] += loss.detach() * len(y)
            train[1] += len(y)
        dist.all_reduce(train)
        val_mse = validate(model, val_loader)
        best = min(best, val_mse)
        if dist.get_rank() == 0 and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1:3d}  train mse {train[0] / train[1]:.4f}  val mse {val_mse:.4f}")

    if dist.get_rank() == 0:
        print(f"best val mse {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
