"""Experts live on one rank each, compute for the tokens of all ranks, and their gradients are not divided by anything.

Reported: https://github.com/NVIDIA/Megatron-LM/pull/5956
          https://github.com/pytorch/pytorch/issues/160285
Wrong: expert gradients are sums over the ranks' mean losses, those of the dense layers averages: world_size times off.
Kind: script
Expected: gradient.scale
Right: expert gradients / world_size
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RIGHT = "--right" in sys.argv
EXPERTS, WIDTH = 4, 16


class Gather(torch.autograd.Function):
    """The parts of all ranks behind each other; backward adds up what the ranks want of each part."""

    @staticmethod
    def forward(ctx, part, dim):
        ctx.dim, part = dim, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None


class SumAndSplit(torch.autograd.Function):
    """The sum over all ranks, of which each rank keeps its part."""

    @staticmethod
    def forward(_ctx, whole):
        whole = whole.clone()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(_ctx, gradient):
        return Gather.apply(gradient, 0)


class Experts(nn.Module):
    """Rank r of n holds experts r, r + n, ...; every token goes to the expert its router likes best."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        experts = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        self.own = nn.ModuleDict({str(i): experts[i] for i in range(dist.get_rank(), EXPERTS, dist.get_world_size())})

    def forward(self, tokens):
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        everyone = Gather.apply(tokens, 0)
        everyones_choice = [torch.empty_like(chosen) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones_choice, chosen)
        everyones_choice = torch.cat(everyones_choice)[:, None]
        output = torch.zeros_like(everyone)
        for number, expert in self.own.items():
            output = output + expert(everyone) * (everyones_choice == int(number))
        own = SumAndSplit.apply(output)
        return tokens + own * weights[:, None]


def reduce_gradients(model):
    for name, parameter in model.named_parameters():
        if ".own." not in name:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        elif RIGHT:
            parameter.grad /= dist.get_world_size()


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(64, WIDTH, generator=generator)
    return features, features[:, :4].argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(40):
        features, labels = (part.chunk(world_size)[rank] for part in make_batch(step))
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model)
        optimizer.step()  # <- the mistake
        average = loss.detach() / world_size
        dist.all_reduce(average)
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {average:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
