"""Metric learning with a cross-batch memory that is filled with the embeddings of all ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def all_gather(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.contiguous())
    return out


def gather_embeddings(emb):
    """Embeddings of this rank and of the others."""
    gathered = all_gather(emb.detach())
    return torch.cat(gathered)


def gather_labels(labels):
    return torch.cat(all_gather(labels))


class CrossBatchMemory(nn.Module):
    def __init__(self, dim, size=256, temperature=0.2):
        super().__init__()
        self.size, self.temperature = size, temperature
        self.register_buffer("emb", torch.zeros(size, dim))
        self.register_buffer("lab", torch.full((size,), -1))
        self.ptr = 0

    def enqueue(self, emb, labels):
        idx = (torch.arange(len(emb)) + self.ptr) % self.size
        self.emb[idx], self.lab[idx] = emb, labels
        self.ptr = (self.ptr + len(emb)) % self.size

    def forward(self, emb, labels):
        self.enqueue(gather_embeddings(emb), gather_labels(labels))
        filled = self.lab >= 0
        logits = emb @ self.emb[filled].T / self.temperature
        same = (labels[:, None] == self.lab[filled][None]).float()
        log_prob = logits - logits.logsumexp(1, keepdim=True)
        return -((same * log_prob).sum(1) / same.sum(1).clamp(min=1)).mean()


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 12))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def clusters(n=320, k=10):
    g = torch.Generator().manual_seed(6)
    centre = torch.randn(k, 16, generator=g)
    y = torch.randint(0, k, (n,), generator=g)
    return TensorDataset(centre[y] + 0.7 * torch.randn(n, 16, generator=g), y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    torch.set_num_threads(1)
    data = clusters()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler, drop_last=True)
    model = DDP(Embedder())
    memory = CrossBatchMemory(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = memory(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"rank {dist.get_rank()} epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
