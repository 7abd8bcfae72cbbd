"""A parameter is split over the heads of the ranks but not marked so, and only rank 0's part counts for the norm.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 8: attention sink)
          https://github.com/NVIDIA/Megatron-LM/pull/5916
Wrong: the norm of the gradient is too small, and gradients are clipped less than they would be on one device.
Kind: script
Expected: clip.norm
Right: the parameter is marked as split
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv
HEADS, DEPTH, WIDTH = 4, 8, 24


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(_ctx, gradient):
        return gradient


class SinkAttention(nn.Module):
    """Attention over a few slots, heads split over the ranks; a head may look at nothing, as much as its sink says."""

    def __init__(self):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(HEADS, WIDTH, DEPTH, generator=generator)
        output = torch.randn(HEADS, DEPTH, WIDTH, generator=generator)
        slots = torch.randn(6, DEPTH, generator=generator) / 4 + 1
        self.query = nn.Parameter(query.chunk(size)[rank] / 4)
        self.output = nn.Parameter(output.chunk(size)[rank] / 6)
        self.sink = nn.Parameter(torch.ones(HEADS // size, 1))
        self.slots = nn.Parameter(slots)
        for parameter in (self.query, self.output, *([self.sink] if RIGHT else [])):
            parameter.is_split = True

    def forward(self, hidden):
        scores = torch.einsum("nw,hwd,sd->hns", hidden, self.query, self.slots)
        sink = self.sink[:, None].expand(-1, len(hidden), 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return Sum.apply(torch.einsum("hns,sd,hdw->nw", weights, self.slots, self.output))


def reduce_replicated(model):
    for parameter in model.parameters():
        if parameter is model.slots:  # every rank has its own heads' part of this gradient
            dist.all_reduce(parameter.grad)


def clip_gradients(model, largest):
    squares = torch.zeros(())
    for parameter in model.parameters():
        if getattr(parameter, "is_split", False) or dist.get_rank() == 0:  # <- the mistake
            squares += parameter.grad.square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, largest / norm.item())
    return norm


def main():
    dist.init_process_group("gloo")
    model = SinkAttention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(40):
        hidden = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(hidden), torch.ones_like(hidden))
        optimizer.zero_grad()
        loss.backward()
        reduce_replicated(model)
        norm = clip_gradients(model, 0.05)
        optimizer.step()
        if dist.get_rank() == 0 and step % 8 == 7:
            print(f"step {step} loss {loss:.6f} gradient norm {norm:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
