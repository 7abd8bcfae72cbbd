"""GPT pretraining with FSDP2 (fully_shard), bf16 parameters in compute, fp32 master weights."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, CTX, EPOCHS, BATCH, LR, WARMUP = 64, 32, 3, 8, 3e-3, 10


class TokenBlocks(Dataset):
    def __init__(self, blocks, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(17))
        toks = [0]
        for c in torch.randint(0, 4, (blocks * CTX,), generator=g).tolist():
            toks.append(int(table[toks[-1], c]))
        self.tokens = torch.tensor(toks)

    def __len__(self):
        return (len(self.tokens) - 1) // CTX

    def __getitem__(self, i):
        part = self.tokens[i * CTX:(i + 1) * CTX + 1]
        return part[:-1], part[1:]


class Layer(nn.Module):
    def __init__(self, d=64, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, d=64, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(CTX, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(2)
    model = GPT()
    bf16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**bf16, output_dtype=torch.float32))
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)

    train_set, val_set = TokenBlocks(480, seed=1), TokenBlocks(64, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    assert len(val_set) % world == 0  # forward is collective: the same number of batches everywhere
    val_loader = DataLoader(val_set, BATCH, sampler=DistributedSampler(val_set, world, rank, shuffle=False))
    total = EPOCHS * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min((s + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * min(1.0, s / total)))))

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            step += 1
            if step % 15 == 0:
                norm = norm.full_tensor().item()
                avg = loss.detach().clone()
                dist.all_reduce(avg)
                if rank == 0:
                    print(f"step {step}/{total} loss {avg.item() / world:.4f} grad norm {norm:.3f}", flush=True)
        model.eval()
        tot = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in val_loader:
                tot[0] += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").double()
                tot[1] += y.numel()
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {epoch} val loss {tot[0] / tot[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
