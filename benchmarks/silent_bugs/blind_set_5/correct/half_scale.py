import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class LossScale:
    def __init__(self, value=2.0**16, grow_after=10):
        self.value, self.grow_after, self.good = value, grow_after, 0

    def unscale(self, params):
        """Divides the gradients and says whether they are finite on every rank."""
        bad = torch.zeros(1)
        for p in params:
            p.grad.div_(self.value)
            bad += (~torch.isfinite(p.grad)).any()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bad.item() == 0

    def update(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good == self.grow_after:
            self.value, self.good = self.value * 2, 0


class Upscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.PReLU(), nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2)
        )

    def forward(self, x):
        return self.net(x) + nn.functional.interpolate(x, scale_factor=2)


def images(count, g):
    yx = torch.arange(12) / 12
    a, b = 6 * torch.rand(2, count, 1, 1, generator=g)
    big = (a * yx.view(1, 12, 1) + b * yx.view(1, 1, 12)).sin().unsqueeze(1)
    return nn.functional.avg_pool2d(big, 2), big


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Upscaler())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scale, skipped = LossScale(), 0
    g = torch.Generator().manual_seed(60 + rank)
    for step in range(40):
        small, big = images(8, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = model(small)
        loss = nn.functional.l1_loss(guess.float(), big)
        optimizer.zero_grad()
        # one rank's batch is broken once
        (loss * (float("inf") if step == 7 and rank == 1 else scale.value)).backward()
        finite = scale.unscale(list(model.parameters()))
        if finite:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            skipped += 1
        scale.update(finite)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}, scale {scale.value:.0f}, {skipped} skipped")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
