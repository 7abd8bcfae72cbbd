"""One-stage detector of bright squares: focal loss and L1, both per object of the global batch."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

SIZE, CELLS, STRIDE = 24, 6, 4
BATCH, EPOCHS = 16, 8


class Squares(Dataset):
    """0 to 4 squares on a noisy background; the target is (object, dx, dy, size) for each cell."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.images = 0.5 * torch.randn(n, 1, SIZE, SIZE, generator=g)
        self.targets = torch.zeros(n, 4, CELLS, CELLS)
        for i in range(n):
            for _ in range(int(torch.randint(0, 5, (), generator=g))):
                half = int(torch.randint(1, 3, (), generator=g))
                cx, cy = torch.randint(2, SIZE - 2, (2,), generator=g).tolist()
                self.images[i, 0, cy - half:cy + half, cx - half:cx + half] += 2.0
                self.targets[i, :, cy // STRIDE, cx // STRIDE] = torch.tensor(
                    [1.0, cx % STRIDE / STRIDE, cy % STRIDE / STRIDE, half / 2])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.targets[i]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
        self.cls, self.box = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 3, 1)
        nn.init.constant_(self.cls.bias, -2.5)

    def forward(self, x):
        h = self.body(x)
        return self.cls(h)[:, 0], self.box(h)


def focal(logits, target, alpha=0.5, gamma=2.0):
    p = logits.sigmoid()
    pt = torch.where(target > 0, p, 1 - p)
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (alpha * (1 - pt) ** gamma * ce).sum()


def criterion(outputs, targets):
    logits, boxes = outputs
    obj = targets[:, 0]
    # DDP averages over the processes, so divide by the mean number of objects of a process
    num_objects = obj.sum()
    dist.all_reduce(num_objects)
    num_objects = torch.clamp(num_objects / dist.get_world_size(), min=1)
    loss_cls = focal(logits, obj) / num_objects
    loss_box = ((boxes - targets[:, 1:]).abs().sum(1) * obj).sum() / num_objects
    return loss_cls, loss_box


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(3)
    for images, targets in loader:
        found, obj = model(images)[0] > 0, targets[:, 0] > 0
        counts += torch.stack([(found & obj).sum(), found.sum(), obj.sum()])
    dist.all_reduce(counts)
    model.train()
    return counts[0] / counts[1].clamp(min=1), counts[0] / counts[2].clamp(min=1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    train, val = Squares(480, seed=1), Squares(119, seed=2)
    sampler = DistributedSampler(train, seed=6)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=30)
    model = DDP(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 7], gamma=0.3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for images, targets in loader:
            loss_cls, loss_box = criterion(model(images), targets)
            optimizer.zero_grad()
            (loss_cls + 0.5 * loss_box).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            sums += torch.stack([loss_cls.detach(), loss_box.detach()])
        scheduler.step()
        sums /= len(loader)
        dist.all_reduce(sums)
        precision, recall = evaluate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}  cls {sums[0] / world:.4f}  box {sums[1] / world:.4f}"
                  f"  precision {precision:.3f}  recall {recall:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
