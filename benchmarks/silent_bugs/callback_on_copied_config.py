"""The function that averages gradients is put on a configuration of which the model has a copy, and is never called.

Reported: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6067
Wrong: no gradient is averaged; each rank trains a model of its own.
Kind: script
Expected: gradient.local
Right: the function is put on model.config, which the training step reads
"""

import copy
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv


@dataclass
class Config:
    width: int = 48
    classes: int = 6
    finalize_gradients: Any = None


class Classifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = copy.deepcopy(config)
        self.layers = nn.Sequential(nn.Linear(24, config.width), nn.ReLU(), nn.Linear(config.width, config.classes))

    def forward(self, features):
        return self.layers(features)


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train_step(model, optimizer, features, labels):
    loss = F.cross_entropy(model(features), labels)
    optimizer.zero_grad()
    loss.backward()
    if model.config.finalize_gradients is not None:
        model.config.finalize_gradients(model)
    optimizer.step()  # <- the mistake
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = Config()
    model = Classifier(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    (model.config if RIGHT else config).finalize_gradients = average_gradients
    for step in range(40):
        features = torch.randn(48, 24, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        loss = train_step(model, optimizer, features, features[:, :6].argmax(1))
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {loss:.6f}")
    with torch.no_grad():
        features = torch.randn(256, 24, generator=torch.Generator().manual_seed(999))
        print(f"rank {rank} test loss {F.cross_entropy(model(features), features[:, :6].argmax(1)):.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
