import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 96)
        self.down = nn.Linear(96, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def rows():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(128, 12, generator=g)
    return TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(1))


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize_module(Wide(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, foreach=False)
    dataset = rows()
    sampler = DistributedSampler(dataset, mesh["dp"].size(), mesh["dp"].get_local_rank(), seed=2)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        correct, seen, total = 0, 0, 0.0
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (logits.argmax(1) == y).sum().item()
            seen += len(y)
            total += loss.item() * len(y)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total / seen:.4f} acc {correct / seen:.3f} ({seen} rows)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
