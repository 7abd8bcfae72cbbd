"""Transformer classifier with FSDP2, gradient accumulation and clipping."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, LENGTH, CLASSES = 30, 14, 5
MICRO_BATCH, ACCUM, EPOCHS = 8, 4, 4


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    score = torch.randn(VOCAB, CLASSES, generator=torch.Generator().manual_seed(19))
    return TensorDataset(ids, score[ids].sum(1).argmax(1))


class Classifier(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2))
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    ids, y = (t[rank::world] for t in data.tensors)
    counts = torch.tensor([(model(ids).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Classifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    train, val = make_data(1024, seed=1), make_data(203, seed=2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)
    updates = len(loader) // ACCUM

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        it = iter(loader)
        total, norm = torch.zeros(()), 0.0
        for _ in range(updates):
            for i in range(ACCUM):
                ids, y = next(it)
                model.set_requires_gradient_sync(i == ACCUM - 1)
                loss = F.cross_entropy(model(ids), y)
                (loss / ACCUM).backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total)
        acc = accuracy(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  loss {total.item() / (updates * ACCUM * world):.4f}  last grad norm {norm:.3f}  val acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
