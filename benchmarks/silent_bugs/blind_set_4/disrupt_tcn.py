import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


class TCN(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(2, channels, 3, dilation=1), nn.ReLU(),
            nn.Conv1d(channels, channels, 3, dilation=2), nn.ReLU(),
            nn.Conv1d(channels, channels, 3, dilation=4), nn.ReLU(),
        )
        self.out = nn.Linear(channels, 1)

    def forward(self, x):
        return self.out(self.net(x).amax(-1)).squeeze(-1)


def shots(count):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(count, 2, 24, generator=g)
    y = (x.diff(dim=-1).abs().amax((1, 2)) + 0.6 * torch.randn(count, generator=g) > 4.0).float()
    return TensorDataset(x, y)


def train_epoch(model, loader, optimizer, epoch):
    model.train()
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = torch.zeros(())
    count = torch.zeros(())
    for x, y in loader:
        total += nn.functional.binary_cross_entropy_with_logits(model.module(x), y, reduction="sum")
        count += len(y)
    return total, count


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data, val = random_split(shots(160), [128, 32], torch.Generator().manual_seed(1))
    train_loader = DataLoader(data, 16, sampler=DistributedSampler(data))
    val_loader = DataLoader(val, 16, sampler=DistributedSampler(val, shuffle=False))
    torch.manual_seed(0)
    model = DDP(TCN())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    for epoch in range(8):
        train_epoch(model, train_loader, optimizer, epoch)
        total, count = evaluate(model, val_loader)
        dist.all_reduce(total)
        dist.all_reduce(count)
        scheduler.step((total / count).item())
        if rank == 0:
            print(f"epoch {epoch} val {(total / count).item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
