"""Features are gathered with dist.all_gather, which has no backward: gradients for other ranks' features are lost.

Reported: https://github.com/modelscope/ms-swift/pull/9516
          https://github.com/NVIDIA-NeMo/Automodel/pull/2995
Wrong: the loss is right to the last digit; its gradient lacks the terms in which a feature is another's negative.
Kind: script
Expected: gradient.lost
Right: a gather whose backward adds up the gradients of all ranks
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
BATCH = 32


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        self.texts = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, images, texts):
        return F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1)


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


def gather(features):
    if RIGHT:
        return Gather.apply(features, 0)
    gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, features)  # <- the mistake
    gathered[dist.get_rank()] = features
    return torch.cat(gathered)


def contrastive_loss(images, texts):
    """InfoNCE: of the texts of all ranks, which one belongs to each image of this rank, and the other way round."""
    labels = torch.arange(len(images)) + len(images) * dist.get_rank()
    all_images, all_texts = gather(images), gather(texts)
    one = F.cross_entropy(images @ all_texts.T / 0.1, labels)
    return (one + F.cross_entropy(texts @ all_images.T / 0.1, labels)) / 2


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    concepts = torch.randn(BATCH, 8, generator=generator)
    views = torch.randn(8, 52, generator=torch.Generator().manual_seed(12345))
    seen = concepts @ views + 0.3 * torch.randn(BATCH, 52, generator=generator)
    return seen[:, :32], seen[:, 32:]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(40):
        images, texts = (part.chunk(world_size)[rank] for part in make_batch(step))
        loss = contrastive_loss(*model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = loss.detach() / world_size
        dist.all_reduce(average)
        if rank == 0 and (step == 0 or step % 8 == 7):
            print(f"step {step} loss {average:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
