"""The vocabulary is split over the ranks, and label smoothing averages over a rank's own part of it.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 1)
          https://github.com/NVIDIA/Megatron-LM/issues/737
Wrong: each rank has another loss, none of them that of the whole vocabulary; gradients pull towards the wrong mean.
Kind: parallelize
Mesh: tensor=2
Expected: criterion (VocabularyParallelCrossEntropy); the mean over tensor equals
Reads: every rank the same batch
Right: the logits are summed over all ranks and divided by the size of the whole vocabulary
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
VOCABULARY, WIDTH, SMOOTHING = 24, 32, 0.2


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)

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
        self.weight = nn.Parameter(head.weight.detach().chunk(group.size())[group.rank()].clone())

    def forward(self, hidden):
        return F.linear(Copy.apply(hidden, self.group), self.weight)


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
        target_logit = logits.gather(1, own.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0] * inside
        loss = log_total - Sum.apply(target_logit, self.group)
        if RIGHT:
            mean_logit = Sum.apply(logits.sum(-1), self.group) / (logits.shape[-1] * self.group.size())
        else:
            mean_logit = logits.mean(-1)  # <- the mistake
        return ((1 - SMOOTHING) * loss + SMOOTHING * (log_total - mean_logit)).mean()


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
