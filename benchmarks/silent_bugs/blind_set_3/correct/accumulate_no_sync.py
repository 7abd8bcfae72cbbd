"""GPT-like model, micro-batches under no_sync, the last of each window synchronises; warm-up and cosine."""
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# config
grad_accum = 4
micro_batch = 8
block_size = 24
max_iters = 16
learning_rate, min_lr, warmup_iters = 3e-3, 3e-4, 3

ddp_rank, ddp_world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1337 + ddp_rank)

text = "".join(chr(97 + (i * i // 3 + 5 * i) % 26) for i in range(4000))
tokens = torch.tensor([ord(c) - 97 for c in text])


def get_batch():
    ix = torch.randint(len(tokens) - block_size - 1, (micro_batch,))
    x = torch.stack([tokens[i:i + block_size] for i in ix])
    y = torch.stack([tokens[i + 1:i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


class GPT(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(26, dim), nn.Embedding(block_size, dim)
        self.block = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, 26, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        logits = self.head(self.block(x, src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    total = 0.0
    for micro in range(grad_accum):
        x, y = get_batch()
        last = micro == grad_accum - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(x, y) / grad_accum
            loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    if ddp_rank == 0 and it % 5 == 0:
        print(f"iter {it}: loss {total.item() / ddp_world:.4f} norm {norm.item():.3f}")
dist.destroy_process_group()
