"""The vocabulary is padded so that the ranks can divide it, and the padding takes part in the softmax.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/1754 (the losses differ; this cause is the one re-made here)
Wrong: words that do not exist get probability; losses and gradients are not those of the model on one device.
Kind: parallelize
Mesh: tensor=2
Expected: head (VocabularyParallelHead) has 22 output features; padding
Reads: every rank the same batch
Right: the logits of the padding are -inf
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

RIGHT = "--right" in sys.argv or bool(os.environ.get("RIGHT"))
AXES = ("tensor",)
VOCABULARY, WIDTH = 21, 32


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, tokens, targets):
        return self.criterion(self.head(self.body(self.embedding(tokens))).flatten(0, 1), targets.flatten())


class Copy(torch.autograd.Function):
    """Nothing in forward; backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """The sum over all ranks; nothing in backward."""

    @staticmethod
    def forward(_ctx, tensor, group):
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, None


class VocabularyParallelHead(nn.Module):
    def __init__(self, head, group):
        super().__init__()
        self.group = group
        rows = -(-VOCABULARY // group.size())
        weight = F.pad(head.weight.detach(), (0, 0, 0, rows * group.size() - VOCABULARY))
        self.weight = nn.Parameter(weight.chunk(group.size())[group.rank()].clone())
        self.first = rows * group.rank()

    def forward(self, hidden):
        logits = F.linear(Copy.apply(hidden, self.group), self.weight)  # <- the mistake
        if RIGHT:
            padding = self.first + torch.arange(logits.shape[-1]) >= VOCABULARY
            logits = logits.masked_fill(padding, float("-inf"))
        return logits


class VocabularyParallelCrossEntropy(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, logits, targets):
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        logits = logits - largest[:, None]
        log_total = Sum.apply(logits.exp().sum(-1), self.group).log()
        own = targets - self.group.rank() * logits.shape[-1]
        inside = (own >= 0) & (own < logits.shape[-1])
        target_logit = logits.gather(1, own.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0].masked_fill(~inside, 0)
        return (log_total - Sum.apply(target_logit, self.group)).mean()


def build():
    torch.manual_seed(0)
    return LanguageModel()


def parallelize(model, mesh):
    group = mesh.get_group("tensor")
    model.head = VocabularyParallelHead(model.head, group)
    model.criterion = VocabularyParallelCrossEntropy(group)
    return model


def inputs(step):
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, VOCABULARY, (8, 1), generator=generator) + 3 * torch.arange(13)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def loss(model, tokens, targets):
    return model(tokens, targets)


def terms(mean, targets):
    return mean * targets.numel(), targets.numel()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=AXES)
    model = parallelize(build(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for step in range(20):
        value = loss(model, *inputs(step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"rank {dist.get_rank()} step {step} loss {value:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
