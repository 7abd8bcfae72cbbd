"""Tensor parallel regression network: first linear split by columns, second by rows; all ranks see the same batches."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

DIM, HIDDEN, LAYERS = 16, 64, 2


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, DIM, generator=g)
    y = 10 * torch.sin(3.1416 * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, (y + 0.5 * torch.randn(n, generator=g) - 14) / 5


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(LAYERS))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)[:, 0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    torch.manual_seed(0)              # the same weights and the same order of the data on all ranks
    model = Regressor()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)

    train = TensorDataset(*friedman(800, seed=1))
    test_x, test_y = friedman(200, seed=2)
    loader = DataLoader(train, batch_size=80, shuffle=True, generator=torch.Generator().manual_seed(5))

    for epoch in range(6):
        model.train()
        total = 0.0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            test = F.mse_loss(model(test_x), test_y).item()
        if rank == 0:
            print(f"epoch {epoch}  train mse {total / len(loader):.4f}  test mse {test:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
