"""The squares of all gradients are summed over the tensor ranks; those of replicated parameters count once per rank.

Reported: https://github.com/NVIDIA-NeMo/RL/pull/3788
          https://github.com/ROCm/TransformerEngine/pull/715
          https://github.com/ByteDance-Seed/VeOmni/issues/184
Wrong: the norm is too large, and gradients are clipped more than they would be on one device.
Kind: script
Expected: clip.norm
Right: replicated parameters count once
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RIGHT = "--right" in sys.argv


def clip_gradients(model, largest):
    split, replicated = torch.zeros(()), torch.zeros(())
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            split += parameter.grad.to_local().square().sum()
        else:
            replicated += parameter.grad.square().sum()
    squares = split if RIGHT else split + replicated
    dist.all_reduce(squares)  # <- the mistake
    norm = (squares + replicated if RIGHT else squares).sqrt()
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, largest / norm.item()))
    return norm


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden + self.down(F.silu(self.up(self.norm(hidden)))))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    model = parallelize_module(Model(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        tokens = (torch.randint(0, 16, (16, 1), generator=generator) + 3 * torch.arange(9)) % 16
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(model, 0.2)
        optimizer.step()
        if dist.get_rank() == 0 and step % 8 == 7:
            print(f"step {step} loss {loss:.6f} gradient norm {norm:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
