"""fully_shard: built on the meta device, the optimizer made of what is sharded."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(96, 10, generator=generator), torch.randn(96, 2, generator=generator))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model[::2]:
        layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            halves = zip(inputs.chunk(2), targets.chunk(2), strict=True)
            for index, (own_inputs, own_targets) in enumerate(halves):
                model.set_requires_gradient_sync(index == 1)
                loss = F.mse_loss(model(own_inputs), own_targets) / 2
                loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}")
    dist.destroy_process_group()


main()
