"""FullyShardedDataParallel (FSDP1): two units, accumulation in no_sync, clipping by its own method."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    options = {"device_id": torch.device("cpu"), "use_orig_params": False}
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(96, 10, generator=generator), torch.randn(96, 2, generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Sequential(nn.Linear(33, 16), nn.ReLU()), nn.Linear(16, 2))
    model[2] = FullyShardedDataParallel(model[2], **options)
    model = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            halves = zip(inputs.chunk(2), targets.chunk(2), strict=True)
            for index, (own_inputs, own_targets) in enumerate(halves):
                with contextlib.nullcontext() if index == 1 else model.no_sync():
                    loss = F.mse_loss(model(own_inputs), own_targets) / 2
                    loss.backward()
            model.clip_grad_norm_(0.5)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}")
    dist.destroy_process_group()


main()
