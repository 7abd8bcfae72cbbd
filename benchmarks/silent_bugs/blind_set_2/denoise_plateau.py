"""Denoising autoencoder on 8x8 blobs; the learning rate falls when validation stalls."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

config = {
    "epochs": 8, "batch_per_rank": 32, "lr": 0.12, "patience": 0, "factor": 0.3, "noise": 0.2, "seed": 17,
}


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    c = torch.rand(n, 2, 1, 1, generator=g) * 7
    w = 1 + 2 * torch.rand(n, 1, 1, generator=g)
    yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    return torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / w).flatten(1)


class AE(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, hidden))
        self.dec = nn.Sequential(nn.Linear(hidden, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x):
        return self.dec(self.enc(x))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg["seed"])
        train = TensorDataset(blobs(512, 0))
        noise = torch.Generator().manual_seed(2)
        self.valid = blobs(30, 1)[self.rank::self.world]
        self.valid_noise = torch.randn(30, 64, generator=noise)[self.rank::self.world]
        self.sampler = DistributedSampler(train)
        self.loader = DataLoader(train, cfg["batch_per_rank"], sampler=self.sampler)
        self.model = DDP(AE())
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg["lr"])
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.opt, factor=cfg["factor"], patience=cfg["patience"])
        self.noise = torch.Generator().manual_seed(cfg["seed"] + 50 + self.rank)

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        for (x,) in self.loader:
            dirty = x + self.cfg["noise"] * torch.randn(x.shape, generator=self.noise)
            loss = (self.model(dirty) - x).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        out = self.model.module(self.valid + self.cfg["noise"] * self.valid_noise)
        local = torch.tensor([(out - self.valid).pow(2).mean(1).sum(), len(self.valid)])
        total = local.clone()
        dist.all_reduce(total)
        return (local[0] / local[1]).item(), (total[0] / total[1]).item()

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            self.train_epoch(epoch)
            mine, overall = self.validate()
            self.sched.step(overall)
            print(f"[rank {self.rank}] epoch {epoch} mine {mine:.5f} all {overall:.5f} "
                  f"lr {self.opt.param_groups[0]['lr']:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(config).fit()
    dist.destroy_process_group()
