"""Training of a small drafter head on hidden states of a target model, sharded with FSDP2."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, HIDDEN, MAX_LEN = 64, 32, 24


class Rollouts(Dataset):
    """Hidden states and the tokens that followed; only the answer part of each sequence is trained on."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        chain = torch.randn(VOCAB, VOCAB, generator=g).mul(2).softmax(1)
        emb = torch.randn(VOCAB, HIDDEN, generator=g)
        self.length = torch.randint(6, MAX_LEN + 1, (n,), generator=g)
        self.prompt = (self.length * torch.rand(n, generator=g) * 0.8).long()
        tok = torch.randint(0, VOCAB, (n,), generator=g)
        seq = [tok]
        for _ in range(MAX_LEN):
            tok = torch.multinomial(chain[tok], 1, generator=g)[:, 0]
            seq.append(tok)
        seq = torch.stack(seq, dim=1)
        self.states = emb[seq[:, :-1]] + 0.5 * torch.randn(n, MAX_LEN, HIDDEN, generator=g)
        self.target = seq[:, 1:]

    def __len__(self):
        return len(self.length)

    def __getitem__(self, i):
        pos = torch.arange(MAX_LEN)
        mask = (pos >= self.prompt[i]) & (pos < self.length[i])
        return self.states[i], self.target[i], mask.float()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.proj(att)
        return x + self.mlp(self.norm2(x))


class Drafter(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(HIDDEN) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)

    model = Drafter()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    dataset = Rollouts(512, seed=1)
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler, drop_last=True)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for step, (states, target, mask) in enumerate(loader):
            logits = model(states)
            ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
            loss_sum = (ce * mask.flatten()).sum()

            stats = torch.stack([loss_sum.detach(), mask.sum()])
            dist.all_reduce(stats)
            total_loss, total_tokens = stats.tolist()
            loss = loss_sum * world_size / total_tokens
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 8 == 0:
                print(f"epoch {epoch} step {step:2d} loss {total_loss / total_tokens:.4f} "
                      f"grad_norm {grad_norm.item():.4f} tokens {int(total_tokens)}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
