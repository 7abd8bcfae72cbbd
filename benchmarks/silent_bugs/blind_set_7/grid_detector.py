"""One-stage detector: every grid cell says whether an object is centred in it, and its box."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

GRID, STRIDE = 6, 4


class Scenes(Dataset):
    """Images with zero to seven rectangles of different sizes."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        size = GRID * STRIDE
        self.images = 0.2 * torch.randn(n, 1, size, size, generator=g)
        self.objectness = torch.zeros(n, GRID, GRID)
        self.boxes = torch.zeros(n, 4, GRID, GRID)
        for k in range(n):
            count = int(torch.randint(0, 8, (1,), generator=g))
            for cell in torch.randperm(GRID * GRID, generator=g)[:count].tolist():
                r, c = divmod(cell, GRID)
                cy = r * STRIDE + int(torch.randint(STRIDE, (1,), generator=g))
                cx = c * STRIDE + int(torch.randint(STRIDE, (1,), generator=g))
                h, w = (torch.randint(1, 4, (2,), generator=g)).tolist()
                self.images[k, 0, max(0, cy - h):cy + h, max(0, cx - w):cx + w] += 1.0
                self.objectness[k, r, c] = 1.0
                self.boxes[k, :, r, c] = torch.tensor(
                    [cy / STRIDE - r, cx / STRIDE - c, h / STRIDE, w / STRIDE])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.objectness[i], self.boxes[i]


class Detector(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())
        self.obj = nn.Conv2d(width, 1, 1)
        self.box = nn.Conv2d(width, 4, 1)
        nn.init.constant_(self.obj.bias, -2.0)

    def forward(self, x):
        h = self.body(x)
        return self.obj(h)[:, 0], self.box(h)


def focal_loss(logits, target, alpha=0.25, gamma=2.0):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    a_t = alpha * target + (1 - alpha) * (1 - target)
    return a_t * (1 - p_t) ** gamma * ce


def criterion(obj_logits, box_pred, objectness, boxes):
    # all losses are normalised by the number of boxes in the whole batch
    num_boxes = objectness.sum().clone()
    dist.all_reduce(num_boxes)
    num_boxes = torch.clamp(num_boxes / dist.get_world_size(), min=1)
    loss_cls = focal_loss(obj_logits, objectness).sum() / num_boxes
    l1 = (box_pred - boxes).abs().sum(1) * objectness
    loss_box = l1.sum() / num_boxes
    return loss_cls, loss_box


@torch.no_grad()
def evaluate(model, loader):
    stats = torch.zeros(4)  # true positives, predicted, present, l1 over present
    for img, obj, boxes in loader:
        logits, pred = model(img)
        found = (logits.sigmoid() > 0.4).float()
        stats += torch.stack([(found * obj).sum(), found.sum(), obj.sum(),
                              ((pred - boxes).abs().mean(1) * obj).sum()])
    dist.all_reduce(stats)
    tp, predicted, present, l1 = stats.tolist()
    return tp / max(predicted, 1), tp / present, l1 / present


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, val = Scenes(512, 1), Scenes(99, 2)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=16)
    model = DDP(Detector())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        log = torch.zeros(3)
        for img, obj, boxes in loader:
            loss_cls, loss_box = criterion(*model(img), obj, boxes)
            loss = loss_cls + 2.0 * loss_box
            opt.zero_grad()
            loss.backward()
            opt.step()
            log += torch.stack([loss_cls.detach(), loss_box.detach(), torch.ones(())])
        dist.all_reduce(log)
        precision, recall, l1 = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch} cls {log[0] / log[2]:.4f} box {log[1] / log[2]:.4f} "
                  f"precision {precision:.3f} recall {recall:.3f} l1 {l1:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
