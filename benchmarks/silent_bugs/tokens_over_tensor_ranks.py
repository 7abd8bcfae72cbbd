"""The number of tokens in the batch is summed over all ranks, and tensor-parallel ranks count the same tokens again.

Reported: https://github.com/huggingface/transformers/pull/39674
          https://github.com/huggingface/transformers/pull/46775
Wrong: the loss is divided by as many times too many tokens as there are tensor-parallel ranks; so are the gradients.
Kind: script
Expected: gradient.scale
Right: summed over the data-parallel ranks alone
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
PAD = 0


class Tagger(nn.Module):
    """Says of each word which tag it has, from the word and its left neighbour."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(32, 16), nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, words):
        hidden = self.embedding(words)
        pairs = torch.cat([hidden, F.pad(hidden, (0, 0, 1, 0))[:, :-1]], -1)
        return self.down(F.relu(self.up(pairs)))


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(1, 32, (12, 10), generator=generator)
    lengths = torch.randint(3, 11, (12, 1), generator=generator)
    words = words.masked_fill(torch.arange(10) >= lengths, PAD)
    return words, (words + F.pad(words, (1, 0))[:, :-1]) % 4


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    tensor = 2 if world_size > 1 else 1
    mesh = init_device_mesh("cpu", (world_size // tensor, tensor), mesh_dim_names=("replicate", "tensor"))
    data_rank, data_size = mesh.get_local_rank("replicate"), mesh["replicate"].size()
    torch.manual_seed(0)
    model = parallelize_module(Tagger(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data_size > 1:
        model = DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    for step in range(24):
        words, tags = (part[data_rank::data_size] for part in make_batch(step))
        mask = words != PAD
        count = mask.sum()
        dist.all_reduce(count, group=mesh.get_group("replicate") if RIGHT else None)  # <- the mistake
        losses = F.cross_entropy(model(words).transpose(1, 2), tags, reduction="none")
        loss = (losses * mask).sum() * data_size / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 6 == 5:
            print(f"step {step} loss {loss:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
