"""GPT in the nanoGPT manner: random blocks of one long token array, accumulation, clipping."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, BLOCK = 30, 16
batch_size = 8  # per micro step and process
global_accumulation = 8  # micro steps of all processes together
max_iters, eval_interval, warmup_iters = 40, 10, 5
learning_rate, min_lr, grad_clip = 3e-3, 3e-4, 1.0


def tokens(n, seed):
    g = torch.Generator().manual_seed(seed)
    table = (2.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))).softmax(-1)
    out, cur = torch.empty(n, dtype=torch.long), 0
    draws = torch.rand(n, generator=g)
    cumulative = table.cumsum(-1)
    for i in range(n):
        cur = min(int(torch.searchsorted(cumulative[cur], draws[i])), VOCAB - 1)
        out[i] = cur
    return out


class GPT(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(BLOCK, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.05)

    def forward(self, idx, targets):
        mask = torch.full((BLOCK, BLOCK), float("-inf")).triu(1)
        x = self.h(self.wte(idx) + self.wpe.weight, mask=mask)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def get_batch(data, generator):
    ix = torch.randint(len(data) - BLOCK, (batch_size,), generator=generator)
    x = torch.stack([data[i:i + BLOCK] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + BLOCK] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def val_loss(model, data, rank, world):
    model.eval()
    sums = torch.zeros(2)
    for start in range(rank * BLOCK, len(data) - BLOCK, world * BLOCK):
        block = data[start:start + BLOCK + 1][None]
        sums += torch.tensor([model(block[:, :-1], block[:, 1:]).item(), 1.0])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    assert global_accumulation % world == 0
    accumulation = global_accumulation // world
    train_data, val_data = tokens(6000, 1), tokens(1000, 2)
    torch.manual_seed(1337)
    model = DDP(GPT())
    torch.manual_seed(1337 + rank)
    draw = torch.Generator().manual_seed(4242 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    for it in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        if it % eval_interval == 0:
            loss = val_loss(model.module, val_data, rank, world)
            if rank == 0:
                print(f"step {it}: val loss {loss:.4f}")
        step_loss = torch.zeros(())
        for micro in range(accumulation):
            x, y = get_batch(train_data, draw)
            model.require_backward_grad_sync = micro == accumulation - 1
            loss = model(x, y) / accumulation
            loss.backward()
            step_loss += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if it % 5 == 0:
            dist.all_reduce(step_loss)
            if rank == 0:
                print(f"iter {it}: loss {step_loss.item() / world:.4f}, norm {norm.item():.3f}, lr {get_lr(it):.2e}")
    loss = val_loss(model.module, val_data, rank, world)
    if rank == 0:
        print(f"final val loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
