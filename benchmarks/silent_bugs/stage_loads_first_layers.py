"""A pipeline stage asks the checkpoint for its layers by their numbers inside the stage, and gets those of stage 0.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 12)
Wrong: loading is strict and succeeds; every stage has the weights of the first layers.
Kind: script
Expected: weights.same
Missed: stages that begin with equal weights may be right (seeded alike): the evidence is the same
Right: the number of the stage's first layer is added
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv
LAYERS, WIDTH = 4, 16


def full_checkpoint():
    """What a run on one device has saved: a model trained for a while."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        features = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(features), features.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


class Stage(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.first = rank * LAYERS // world_size
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS // world_size))

    def load(self, checkpoint):
        for number, layer in enumerate(self.layers):
            position = number + self.first if RIGHT else number
            weights = {key: checkpoint[f"{position}.{key}"] for key in ("weight", "bias")}
            layer.load_state_dict(weights)  # <- the mistake

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def train_step(stage, optimizer, features, rank, world_size):
    """Activations go up the stages, gradients come down again."""
    received = features if rank == 0 else torch.empty_like(features)
    if rank > 0:
        dist.recv(received, rank - 1)
    received.requires_grad_()
    output = stage(received)
    loss = torch.zeros(())
    if rank < world_size - 1:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
    else:
        loss = F.mse_loss(output, features.detach().flip(1))
        loss.backward()
    if rank > 0:
        dist.send(received.grad, rank - 1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, world_size)
    stage.load(full_checkpoint())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.2)
    for step in range(12):
        features = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1000 + step))
        loss = train_step(stage, optimizer, features, rank, world_size)
        if rank == world_size - 1 and step % 3 == 0:
            print(f"step {step} loss {loss:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
