# two tasks, one trunk with activation checkpointing
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CFG = {"lr": 3e-3, "epochs": 3, "batch": 32, "aux_weight": 0.3, "width": 32, "depth": 3}


class Multi(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.05)) for _ in range(depth))
        self.cls, self.reg = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + checkpoint(b, h, use_reentrant=False)
        return self.cls(h), self.reg(h).squeeze(-1)


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Multi(cfg["width"], cfg["depth"]))
    torch.manual_seed(1 + rank)  # from here on: dropout differs from rank to rank
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=g)
    data = TensorDataset(x, (x[:, :3] + 0.2 * x[:, 3:6]).argmax(1), x.abs().mean(1))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=cfg["batch"] // world, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        log = torch.zeros(2)
        for xb, label, value in loader:
            logits, guess = model(xb)
            main_loss = F.cross_entropy(logits, label)
            aux = F.smooth_l1_loss(guess, value)
            opt.zero_grad()
            (main_loss + cfg["aux_weight"] * aux).backward()
            opt.step()
            log += torch.stack([main_loss.detach(), aux.detach()])
        dist.all_reduce(log)
        if rank == 0:
            a, b = (log / world / len(loader)).tolist()
            print(f"epoch {epoch} class {a:.4f} aux {b:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CFG)
