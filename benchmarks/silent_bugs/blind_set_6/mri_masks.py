# Reconstruction of undersampled k-space, a small U-Net free version of the fastMRI baseline.
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

SIZE = 24
EPOCHS = 4
BATCH = 8


class RandomMaskFunc:
    """Keeps the centre lines of k-space and a random choice of the others."""

    def __init__(self, center_fraction, acceleration, seed=None):
        self.center_fraction = center_fraction
        self.acceleration = acceleration
        self.rng = np.random.RandomState(seed)

    def __call__(self, num_cols, seed=None):
        rng = self.rng if seed is None else np.random.RandomState(seed)
        num_low = round(num_cols * self.center_fraction)
        prob = (num_cols / self.acceleration - num_low) / (num_cols - num_low)
        mask = rng.uniform(size=num_cols) < prob
        pad = (num_cols - num_low + 1) // 2
        mask[pad:pad + num_low] = True
        return torch.from_numpy(mask.astype(np.float32))


class SliceDataset(Dataset):
    def __init__(self, n, seed, mask_func, fixed_masks=False):
        g = torch.Generator().manual_seed(seed)
        low = torch.randn(n, 1, 6, 6, generator=g)
        self.target = F.interpolate(low, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
        self.mask_func = mask_func
        self.fixed_masks = fixed_masks

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        target = self.target[i]
        mask = self.mask_func(SIZE, seed=i if self.fixed_masks else None)
        kspace = torch.fft.fftshift(torch.fft.fft2(target), dim=(-2, -1)) * mask
        image = torch.fft.ifft2(torch.fft.ifftshift(kspace, dim=(-2, -1))).real
        return image, target, mask


def worker_init_fn(worker_id):
    """Seed the mask function of this loading process, anew in every epoch."""
    info = get_worker_info()
    seed = info.seed
    if dist.is_initialized():
        seed = seed + dist.get_rank() * info.num_workers
    info.dataset.mask_func.rng.seed(seed % (2**32 - 1))


class Net(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, 1, 3, padding=1),
        )

    def forward(self, x):
        return x + self.body(x)


def validate(model, dataset, rank, world):
    model.eval()
    err = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for i in range(rank, len(dataset), world):
            image, target, _ = dataset[i]
            out = model(image[None])[0]
            err[0] += ((out - target) ** 2).sum() / (target ** 2).sum()
            err[1] += 1
    dist.all_reduce(err)
    return (err[0] / err[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)

    train_set = SliceDataset(256, 0, RandomMaskFunc(0.15, 4))
    val_set = SliceDataset(30, 1, RandomMaskFunc(0.15, 4), fixed_masks=True)
    sampler = DistributedSampler(train_set, shuffle=True, seed=42)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler, num_workers=2,
                        worker_init_fn=worker_init_fn, drop_last=True)

    model = DDP(Net())
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=3, gamma=0.1)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(2)
        for image, target, _ in loader:
            loss = F.l1_loss(model(image), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(running)
        nmse = validate(model.module, val_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: l1 {running[0] / running[1]:.4f}  val nmse {nmse:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
