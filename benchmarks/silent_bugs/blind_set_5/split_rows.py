import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


class RowLinear(nn.Module):
    """Input features are split over the mesh; the partial outputs are summed."""

    def __init__(self, linear, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(1)]))
        self.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Replicate()]))

    def forward(self, x):
        bias = self.bias.to_local()
        share = bias + (bias / self.mesh.size() - bias).detach()
        y = nn.functional.linear(x, self.weight.to_local(), share)
        return DTensor.from_local(y, self.mesh, [Partial()]).redistribute(placements=[Replicate()]).to_local()


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(nn.functional.relu(self.up(x)))


class Regressor(nn.Module):
    def __init__(self, features, width, depth):
        super().__init__()
        self.inp = nn.Linear(features, width)
        self.blocks = nn.ModuleList(FeedForward(width, 4 * width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def split(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel()})
        block.down = RowLinear(block.down, mesh)
    return model


def houses(count, g):
    x = torch.randn(count, 10, generator=g)
    return x, 2.0 + x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = split(Regressor(10, 16, 2), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    for step in range(60):
        x, price = houses(32, g)
        loss = nn.functional.mse_loss(model(x), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 15 == 14:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
