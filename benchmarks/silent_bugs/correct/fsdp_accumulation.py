"""fully_shard with gradient accumulation: gradients are reduced with the last micro-batch alone."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MICRO_BATCHES = 4


def get_batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(64, 32, generator=generator)
    return features[rank::world_size], features[rank::world_size, :8].argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)], nn.Linear(32, 8))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for step in range(24):
        features, labels = get_batch(step, rank, world_size)
        total = torch.zeros(())
        pairs = zip(features.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True)
        for index, (inputs, targets) in enumerate(pairs):
            model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
            loss = F.cross_entropy(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {total / world_size:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
