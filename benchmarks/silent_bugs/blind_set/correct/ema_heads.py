# Two heads on a partly frozen backbone, EMA weights for evaluation.
# python ema_heads.py --nprocs 2
import argparse
import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLS_WEIGHT, BOX_WEIGHT = 1.0, 0.25


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.cls = nn.Linear(256, 4)
        self.box = nn.Linear(256, 2)

    def forward(self, x):
        h = self.body(self.stem(x)).flatten(1)
        return self.cls(h), self.box(h).sigmoid()


class EMA:
    def __init__(self, module, decay):
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, module):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for mean, value in zip(self.module.parameters(), module.parameters()):
            mean.lerp_(value.detach(), 1 - d)


def stamps(n, seed):
    g = torch.Generator().manual_seed(seed)
    patterns = torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(3)) * 2
    kind = torch.randint(0, 4, (n,), generator=g)
    corner = torch.randint(0, 12, (n, 2), generator=g)
    image = 0.3 * torch.randn(n, 1, 16, 16, generator=g)
    for i in range(n):
        r, c = corner[i].tolist()
        image[i, 0, r : r + 5, c : c + 5] += patterns[kind[i]]
    return TensorDataset(image, kind, corner.float() / 11)


def run(rank, world, init_file, args):
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(1)

    net = TwoHeads()
    net.stem.requires_grad_(False)  # stays as it is for the whole run
    model = DDP(net)
    ema = EMA(net, 0.98)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr)
    xent, l1 = nn.CrossEntropyLoss(), nn.SmoothL1Loss()

    train_set = stamps(384, seed=1)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=2)
    loader = DataLoader(train_set, batch_size=args.batch // world, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        parts = torch.zeros(3)
        for image, kind, where in loader:
            logits, box = model(image)
            loss_cls, loss_box = xent(logits, kind), l1(box, where)
            optimizer.zero_grad()
            (CLS_WEIGHT * loss_cls + BOX_WEIGHT * loss_box).backward()
            nn.utils.clip_grad_value_(trainable, 1.0)
            optimizer.step()
            ema.update(net)
            parts += torch.stack([loss_cls.detach(), loss_box.detach(), torch.ones(())])
        dist.all_reduce(parts)
        if rank == 0:
            print(f"epoch {epoch}: cls {parts[0] / parts[2]:.4f} box {parts[1] / parts[2]:.5f}", flush=True)

    if rank == 0:  # the EMA copies are equal on all ranks, one is enough
        image, kind, where = stamps(200, seed=9).tensors
        logits, box = ema.module(image)
        acc = (logits.argmax(1) == kind).float().mean().item()
        err = (box - where).abs().mean().item()
        print(f"ema: accuracy {acc:.4f} position error {err:.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--nprocs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        init_file = os.path.join(folder, "rendezvous")
        mp.spawn(run, args=(args.nprocs, init_file, args), nprocs=args.nprocs)
