"""Train a small GAN vocoder (mel -> waveform) on several GPUs.

torchrun --standalone --nproc-per-node 2 train_vocoder.py
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

HOP, MELS, FRAMES, CROP = 16, 20, 24, 12


class MelAudioDataset(Dataset):
    def __init__(self, n, seed, crop=CROP):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(FRAMES * HOP) / 400.0
        f0 = 3 + 9 * torch.rand(n, 1, generator=g)
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        amp = 0.3 + 0.5 * torch.rand(n, 1, generator=g)
        self.audio = amp * torch.sin(2 * math.pi * f0 * t + phase)
        frames = self.audio.view(n, FRAMES, HOP)
        basis = torch.randn(HOP, MELS, generator=torch.Generator().manual_seed(0))
        self.mel = (frames @ basis).transpose(1, 2) / 4.0
        self.crop = crop

    def __len__(self):
        return len(self.audio)

    def __getitem__(self, i):
        if self.crop is None:
            return self.mel[i], self.audio[i]
        s = int(torch.randint(0, FRAMES - self.crop + 1, (1,)))
        return self.mel[i, :, s:s + self.crop], self.audio[i, s * HOP:(s + self.crop) * HOP]


class Generator(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(MELS, ch, 3, padding=1), nn.LeakyReLU(0.2),
            nn.ConvTranspose1d(ch, ch, 8, stride=4, padding=2), nn.LeakyReLU(0.2),
            nn.ConvTranspose1d(ch, ch, 8, stride=4, padding=2), nn.LeakyReLU(0.2),
            nn.Conv1d(ch, 1, 7, padding=3), nn.Tanh())

    def forward(self, mel):
        return self.net(mel).squeeze(1)


class Discriminator(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, ch, 9, stride=2, padding=4), nn.LeakyReLU(0.2),
            nn.Conv1d(ch, ch, 9, stride=2, padding=4), nn.LeakyReLU(0.2),
            nn.Conv1d(ch, 1, 3, padding=1))

    def forward(self, x):
        return self.net(x.unsqueeze(1))


def spectral_loss(x, y):
    win = torch.hann_window(64)
    sx = torch.stft(x, 64, 16, window=win, return_complex=True).abs()
    sy = torch.stft(y, 64, 16, window=win, return_complex=True).abs()
    return F.l1_loss(sx, sy)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--lambda-adv", type=float, default=0.5)
    p.add_argument("--adv-start", type=int, default=2)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(777)
    gen, disc = DDP(Generator()), DDP(Discriminator())
    torch.manual_seed(777 + rank)  # random crops

    train_set, dev_set = MelAudioDataset(320, seed=1), MelAudioDataset(48, seed=2, crop=None)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.8, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=5e-4, betas=(0.8, 0.99))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        gen.train()
        total = torch.zeros(3)
        for mel, wav in loader:
            fake = gen(mel)
            spec = spectral_loss(fake, wav)
            loss_g = spec
            if epoch >= args.adv_start:
                adv = (disc(fake) - 1).pow(2).mean()
                loss_g = loss_g + args.lambda_adv * adv
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()

            if epoch >= args.adv_start:
                real_s, fake_s = disc(wav), disc(fake.detach())
                loss_d = (real_s - 1).pow(2).mean() + fake_s.pow(2).mean()
                opt_d.zero_grad()
                loss_d.backward()
                opt_d.step()
                total[1] += loss_d.item()
            total[0] += spec.item()
            total[2] += 1
        dist.all_reduce(total)

        gen.eval()
        dev = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for i in range(rank, len(dev_set), world):
                mel, wav = dev_set[i]
                dev[0] += spectral_loss(gen.module(mel[None]), wav[None]).double()
                dev[1] += 1
        dist.all_reduce(dev)
        if rank == 0:
            print(f"epoch {epoch}: spec {total[0] / total[2]:.4f} disc {total[1] / total[2]:.4f} "
                  f"dev spec {dev[0] / dev[1]:.4f}", flush=True)

    if rank == 0:
        os.makedirs("exp", exist_ok=True)
        torch.save(gen.module.state_dict(), "exp/vocoder.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
