"""Embedding and head share a weight, on the first and the last stage of a pipeline, and their gradients are not summed.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/844 (there the two stages all-reduced mismatched shards)
Wrong: each stage updates its copy with its own gradient only, so the two copies of the tied weight diverge.
Kind: script
Expected: replicas.drift
Missed: audit cannot know that these weights must stay equal: other weights of two stages can start equal, too
Right: the two stages all-reduce the gradient of the tied weight
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
        self.tied_weight = embedding.weight  # used by the embedding, the head, or both

    def forward(self, hidden):
        if self.is_first:
            hidden = F.embedding(hidden, self.tied_weight)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return F.linear(hidden, self.tied_weight) / 4 if self.is_last else hidden


def train_step(stage, optimizer, tokens, targets):
    """Send activations to the next stage and gradients to the previous one; return the loss on the last stage."""
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
        dist.all_reduce(
            stage.tied_weight.grad
        )  # with two ranks, the default group has exactly the first and the last stage
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
        tokens = (torch.randint(0, VOCABULARY, (16, 1), generator=generator) + 3 * torch.arange(9)) % VOCABULARY
        loss = train_step(stage, optimizer, tokens[:, :-1], tokens[:, 1:])
        if stage.is_last and step % 8 == 7:
            print(f"step {step} loss {loss:.6f}")
    print(f"rank {rank} norm of the shared weight {stage.tied_weight.norm():.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor, and must release it before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
