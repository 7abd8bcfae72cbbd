"""VAE with KL annealing; saves after every epoch and can be resumed."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DIM, LATENT = 36, 6


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(LATENT, DIM, generator=torch.Generator().manual_seed(63))
    return TensorDataset(torch.sigmoid(torch.randn(n, LATENT, generator=g) @ w))


class VAE(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(DIM, hidden), nn.ReLU(), nn.Linear(hidden, 2 * LATENT))
        self.dec = nn.Sequential(nn.Linear(LATENT, hidden), nn.ReLU(), nn.Linear(hidden, DIM))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.dec(z), mu, logvar


def terms(x, out):
    recon, mu, logvar = out
    rec = F.binary_cross_entropy_with_logits(recon, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return rec, kl


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    x = data.tensors[0][rank::world]
    rec, kl = terms(x, model(x))
    sums = torch.tensor([rec.sum().item(), kl.sum().item(), len(x)])
    dist.all_reduce(sums)
    model.train()
    return sums[0] / sums[2], sums[1] / sums[2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", default="runs/vae")
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = make_data(960, seed=1), make_data(157, seed=2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = DDP(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    start_epoch, step = 0, 0
    if args.resume:
        state = torch.load(args.resume, map_location="cpu")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch, step = state["epoch"] + 1, state["step"]

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        torch.manual_seed(1000 * (epoch + 1) + rank)       # sampling noise, the same after a restart
        sums = torch.zeros(())
        for (x,) in loader:
            beta = min(1.0, (step + 1) / 90)
            rec, kl = terms(x, model(x))
            loss = (rec + beta * kl).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            sums += loss.detach()
        scheduler.step()
        dist.all_reduce(sums)
        rec, kl = evaluate(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  loss {sums.item() / world / len(loader):.4f}  val rec {rec:.4f}  val kl {kl:.4f}")
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch, "step": step},
                       os.path.join(args.out, f"epoch_{epoch}.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
