"""Embedding and head share a weight, on the first and the last stage of a pipeline, and each keeps its own gradient.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/844 (there the sum was taken, of the wrong parts)
Wrong: each copy steps with its part of the gradient; what began as one weight is two.
Kind: script
Expected: replicas.drift
Missed: a weight that two stages begin with may be alike by its seed alone: nothing says that it is to stay one
Right: the two stages add up their gradients of it
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv
VOCABULARY, WIDTH = 20, 32


class Stage(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        torch.manual_seed(0)
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
        self.is_first, self.is_last = rank == 0, rank == world_size - 1
        self.layers = nn.ModuleList(layers[rank * 2 // world_size : (rank + 1) * 2 // world_size])
        self.shared = embedding.weight  # of the embedding, of the head, or of both

    def forward(self, hidden):
        if self.is_first:
            hidden = F.embedding(hidden, self.shared)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.linear(hidden, self.shared) / 4 if self.is_last else hidden


def train_step(stage, optimizer, tokens, targets):
    """Activations go up the stages, gradients come down again."""
    rank = dist.get_rank()
    received = tokens
    if not stage.is_first:
        received = torch.empty(*tokens.shape, WIDTH)
        dist.recv(received, rank - 1)
        received.requires_grad_()
    output = stage(received)
    loss = None
    if stage.is_last:
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten())
        loss.backward()
    else:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
    if not stage.is_first:
        dist.send(received.grad, rank - 1)
    if RIGHT:
        dist.all_reduce(stage.shared.grad)  # two stages: the first and the last
    optimizer.step()  # <- the mistake
    optimizer.zero_grad()
    return loss


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, world_size)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.3)
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        text = (torch.randint(0, VOCABULARY, (16, 1), generator=generator) + 3 * torch.arange(9)) % VOCABULARY
        loss = train_step(stage, optimizer, text[:, :-1], text[:, 1:])
        if stage.is_last and step % 8 == 7:
            print(f"step {step} loss {loss:.6f}")
    print(f"rank {rank} norm of the shared weight {stage.shared.norm():.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
