"""FSDP2 training; the optimizer's state is created ahead so that a sharded checkpoint could be loaded into it."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, CONTEXT = 32, 16


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class TinyLM(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def build_sharded_optimizer(model, lr):
    """AdamW whose moments exist from the start (needed by the distributed checkpoint)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    saved = [dict(lr=g["lr"], weight_decay=g["weight_decay"]) for g in optimizer.param_groups]
    for g in optimizer.param_groups:
        g["lr"] = g["weight_decay"] = 0.0
    optimizer.step()
    for g, values in zip(optimizer.param_groups, saved):
        g.update(values)
    for state in optimizer.state.values():
        state["step"].zero_()
    optimizer.zero_grad()
    return optimizer


def batch(step, rank, size=16):
    g = torch.Generator().manual_seed(step * 1000 + rank)
    start = torch.randint(0, VOCAB, (size, 1), generator=g)
    stride = torch.randint(1, 4, (size, 1), generator=g)
    ids = (start + stride * torch.arange(CONTEXT + 1)) % VOCAB
    return ids[:, :-1], ids[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world,))
    model = TinyLM()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_sharded_optimizer(model, lr=3e-3)
    for step in range(20):
        x, y = batch(step, rank)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step} loss {value.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
