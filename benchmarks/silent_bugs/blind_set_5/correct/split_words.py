import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(width), Mixer(width)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Model(nn.Module):
    def __init__(self, vocab=48, width=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.out(self.norm(h))


def split(model, mesh):
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "norm": SequenceParallel(),
            "mixer": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mixer.up": ColwiseParallel(),
            "mixer.gate": ColwiseParallel(),
            "mixer.down": RowwiseParallel(output_layouts=Shard(1)),
        })
    return model


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = split(Model(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    g = torch.Generator().manual_seed(2)
    for step in range(20):
        ids = torch.randint(0, 48, (6, 1), generator=g) * torch.ones(13, dtype=torch.long)
        ids = (ids + 5 * torch.arange(13)) % 48
        with loss_parallel():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor().item()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
