"""The loss is multiplied by the number of all ranks, though the tensor-parallel ones among them read the same batch.

Reported: https://github.com/huggingface/transformers/pull/45994
Wrong: losses and gradients are as many times too large as there are tensor-parallel ranks.
Kind: script
Expected: gradient.scale
Right: times the number of data-parallel ranks
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
IGNORE = -100


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 24), nn.Linear(24, 16)
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + self.down(F.gelu(self.up(hidden))))


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, 16, (16, 1), generator=generator) + 5 * torch.arange(13)) % 16
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.rand(16, 12, generator=generator) < 0.25, IGNORE)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    tensor = 2 if world_size > 1 else 1
    mesh = init_device_mesh("cpu", (world_size // tensor, tensor), mesh_dim_names=("replicate", "tensor"))
    data_rank, data_size = mesh.get_local_rank("replicate"), mesh["replicate"].size()
    torch.manual_seed(0)
    model = parallelize_module(Model(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data_size > 1:
        model = DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, foreach=False)
    for step in range(16):
        tokens, targets = (part[data_rank::data_size] for part in make_batch(step))
        num_items_in_batch = (targets != IGNORE).sum()
        dist.all_reduce(num_items_in_batch, group=mesh.get_group("replicate"))
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum") / num_items_in_batch
        loss = loss * (data_size if RIGHT else world_size)  # <- the mistake
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"step {step} loss {loss:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
