# FSDP2 on a small MLP
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def build_model():
    return nn.Sequential(
        nn.Linear(10, 64), nn.GELU(),
        nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, 1),
    )


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main(epochs=3, global_batch=64):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(21)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 10, generator=g)
    y = (x[:, :3].prod(1) + x[:, 3:].sum(1)).unsqueeze(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=global_batch // world, sampler=sampler)

    model = build_model()
    shard(model, mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        acc = torch.zeros(2)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            loss.backward()
            opt.step()
            model.zero_grad()
            acc += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} train mse {(acc[0] / acc[1]).item():.4f}")
    dist.destroy_process_group()


main()
