"""Token classifier trained with fully_shard (FSDP2)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LENGTH, TAGS = 50, 14, 5


def tagged_sentences(n, seed):
    """The tag of a word depends on the word and on the one before it."""
    g = torch.Generator().manual_seed(seed)
    rule = torch.Generator().manual_seed(31)
    own, before = torch.randint(TAGS, (VOCAB,), generator=rule), torch.randint(TAGS, (VOCAB,), generator=rule)
    x = torch.randint(VOCAB, (n, LENGTH), generator=g)
    prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), x[:, :-1]], 1)
    return TensorDataset(x, (own[x] + before[prev]) % TAGS)


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 3, padding=1)
        self.out = nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.out(F.gelu(h))


class Tagger(nn.Module):
    def __init__(self, dim=32, depth=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, TAGS)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def main(seed=6, epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, val = tagged_sentences(512, 1), tagged_sentences(128, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=seed)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=32)

    torch.manual_seed(seed)  # same initial weights everywhere before they are sharded
    model = Tagger()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        log = torch.zeros(3)
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            opt.step()
            sched.step()
            log += torch.stack([loss.detach(), norm.detach(), torch.ones(())])
        dist.all_reduce(log)
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for x, y in val_loader:
                counts += torch.tensor([float((model(x).argmax(-1) == y).sum()), float(y.numel())])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch} loss {log[0] / log[2]:.4f} grad norm {log[1] / log[2]:.4f} val acc {counts[0] / counts[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
