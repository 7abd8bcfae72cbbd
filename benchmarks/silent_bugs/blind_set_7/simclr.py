"""SimCLR pretraining on feature vectors, negatives from all processes."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distF
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 64
EPOCHS = 8
TEMPERATURE = 0.2


def make_data(n=768, dim=40, clusters=12):
    g = torch.Generator().manual_seed(21)
    centers = 1.5 * torch.randn(clusters, dim, generator=g)
    y = torch.randint(0, clusters, (n,), generator=g)
    return TensorDataset(centers[y] + torch.randn(n, dim, generator=g), y)


def augment(x):
    keep = (torch.rand_like(x) > 0.2).float()
    return x * keep + 0.3 * torch.randn_like(x)


class Encoder(nn.Module):
    def __init__(self, dim=40, hidden=64, proj=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim, hidden), nn.LayerNorm(hidden), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, proj))

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=-1)


def gather_embeddings(z):
    """[2B, d] of this process -> [world * 2B, d]"""
    parts = distF.all_gather(z)
    return torch.cat(list(parts))


def info_nce(z):
    """z: both views of the local samples, [view 1; view 2]."""
    n = z.size(0)
    all_z = gather_embeddings(z)
    offset = dist.get_rank() * n
    rows = torch.arange(n)
    logits = z @ all_z.t() / TEMPERATURE
    logits[rows, offset + rows] = float("-inf")             # not with itself
    target = offset + (rows + n // 2) % n                    # the other view
    return F.cross_entropy(logits, target)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    dataset = make_data()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    torch.manual_seed(1000 + rank)      # augmentations

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(())
        for x, _ in loader:
            z = model(torch.cat([augment(x), augment(x)]))
            loss = info_nce(z)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            epoch_loss += loss.detach()
        epoch_loss /= len(loader)
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch}  loss {epoch_loss / world:.4f}  lr {scheduler.get_last_lr()[0]:.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
