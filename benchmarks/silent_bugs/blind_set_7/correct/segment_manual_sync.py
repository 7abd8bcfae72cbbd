"""Segmentation without the DDP wrapper: gradients are averaged by hand, early stopping on mean IoU."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

CLASSES, SIZE = 3, 20


class Blobs(Dataset):
    def __init__(self, n, seed, augment=False):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        self.mask = torch.zeros(n, SIZE, SIZE, dtype=torch.long)
        for k in range(n):
            for label in (1, 2):
                cy, cx = torch.randint(3, SIZE - 3, (2,), generator=g).tolist()
                r = int(torch.randint(2, 6, (1,), generator=g))
                self.mask[k][(yy - cy) ** 2 + (xx - cx) ** 2 <= r * r] = label
        level = torch.tensor([0.0, 0.8, -0.8])
        self.image = level[self.mask] + 0.5 * torch.randn(n, SIZE, SIZE, generator=g)
        self.augment = augment

    def __len__(self):
        return len(self.mask)

    def __getitem__(self, i):
        image, mask = self.image[i], self.mask[i]
        if self.augment:
            turns, flip = int(torch.randint(4, ())), bool(torch.rand(()) < 0.5)
            image, mask = torch.rot90(image, turns), torch.rot90(mask, turns)
            if flip:
                image, mask = image.flip(0), mask.flip(0)
        return image[None].contiguous(), mask.contiguous()


def build():
    def block(i, o):
        return [nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU()]
    return nn.Sequential(*block(1, 16), *block(16, 24), *block(24, 24), nn.Conv2d(24, CLASSES, 1))


def sync_gradients(model, world):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))


@torch.no_grad()
def mean_iou(model, loader):
    confusion = torch.zeros(CLASSES, CLASSES)
    for image, mask in loader:
        pred = model(image).argmax(1)
        confusion += torch.bincount((mask * CLASSES + pred).flatten(), minlength=CLASSES ** 2).view(CLASSES, CLASSES)
    dist.all_reduce(confusion)
    hit = confusion.diag()
    return (hit / (confusion.sum(0) + confusion.sum(1) - hit)).mean().item()


def main(seed=23, max_epochs=7, patience=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train, val = Blobs(320, 1, augment=True), Blobs(61, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=seed)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), batch_size=16)
    torch.manual_seed(seed)
    model = build()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    torch.manual_seed(seed + 500 + rank)  # augmentation
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max", factor=0.5, patience=1)
    best, waited = 0.0, 0
    for epoch in range(max_epochs):
        sampler.set_epoch(epoch)
        log = torch.zeros(2)
        for image, mask in loader:
            loss = F.cross_entropy(model(image), mask)
            opt.zero_grad()
            loss.backward()
            sync_gradients(model, world)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            log += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(log)
        iou = mean_iou(model, val_loader)  # the same number on every rank
        sched.step(iou)
        if rank == 0:
            print(f"epoch {epoch} loss {log[0] / log[1]:.4f} mIoU {iou:.4f} lr {opt.param_groups[0]['lr']:.1e}")
        waited = 0 if iou > best else waited + 1
        best = max(best, iou)
        if waited > patience:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
