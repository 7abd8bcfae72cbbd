"""Discrete VAE on small synthetic pictures; the learning rate is lowered when the loss stays on a plateau."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--learning_rate", type=float, default=5e-3)
parser.add_argument("--num_tokens", type=int, default=32)
args = parser.parse_args()


class Shapes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        cx, cy, r = (4 + 8 * torch.rand(3, n, 1, 1, generator=g)).unbind(0)
        disk = ((xx - cx) ** 2 + (yy - cy) ** 2 < (r / 2) ** 2).float()
        color = torch.rand(n, 3, 1, 1, generator=g)
        self.images = color * disk[:, None] + 0.1 * torch.randn(n, 3, 16, 16, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class DiscreteVAE(nn.Module):
    def __init__(self, num_tokens, dim=16, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, hidden, 4, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv2d(hidden, hidden, 4, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv2d(hidden, num_tokens, 1))
        self.codebook = nn.Embedding(num_tokens, dim)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(dim, hidden, 4, stride=2, padding=1), nn.ReLU(),
                                     nn.ConvTranspose2d(hidden, hidden, 4, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv2d(hidden, 3, 1))

    def forward(self, img, temp, noise):
        logits = self.encoder(img)
        soft = ((logits + noise) / temp).softmax(dim=1)
        sampled = torch.einsum("bnhw,nd->bdhw", soft, self.codebook.weight)
        recon = F.mse_loss(self.decoder(sampled), img)
        log_q = logits.log_softmax(dim=1)
        kl = (log_q.exp() * (log_q + math.log(logits.shape[1]))).sum(1).mean()
        return recon + 1e-3 * kl


def average_all(tensor):
    averaged = tensor.detach().clone()
    dist.all_reduce(averaged)
    return averaged / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    dataset = Shapes(640, seed=4)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    vae = DDP(DiscreteVAE(args.num_tokens))
    opt = torch.optim.Adam(vae.parameters(), lr=args.learning_rate)
    sched = ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=1, cooldown=0, min_lr=1e-5)
    torch.manual_seed(1000 + rank)  # the Gumbel noise is different on every process

    global_step, temp = 0, 1.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images in loader:
            u = torch.rand(len(images), args.num_tokens, 4, 4).clamp(1e-6, 1 - 1e-6)
            loss = vae(images, temp, -torch.log(-torch.log(u)))
            opt.zero_grad()
            loss.backward()
            opt.step()

            if global_step % 5 == 0:
                avg_loss = average_all(loss)
                temp = max(temp * math.exp(-0.01), 0.5)
                sched.step(avg_loss.item())
                if rank == 0 and global_step % 20 == 0:
                    print(f"{epoch} {global_step} loss {avg_loss.item():.5f} lr {opt.param_groups[0]['lr']:.6f}",
                          flush=True)
            global_step += 1

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
