import argparse
import logging
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("audio")


def parse_args(argv=None):
    p = argparse.ArgumentParser("keyword spotting")
    g = p.add_argument_group("data")
    g.add_argument("--num-clips", type=int, default=960)
    g.add_argument("--num-classes", type=int, default=6)
    g.add_argument("--mel-bins", type=int, default=16)
    g.add_argument("--frames", type=int, default=20)
    g.add_argument("--batch-size-per-gpu", type=int, default=32)
    g.add_argument("--workers", type=int, default=0)
    g = p.add_argument_group("model")
    g.add_argument("--channels", type=int, default=24)
    g.add_argument("--dropout", type=float, default=0.1)
    g = p.add_argument_group("optim")
    g.add_argument("--opt", choices=["adamw", "sgd"], default="adamw")
    g.add_argument("--max-lr", type=float, default=1e-2)
    g.add_argument("--weight-decay", type=float, default=0.05)
    g.add_argument("--epochs", type=int, default=4)
    g.add_argument("--pct-start", type=float, default=0.3)
    g.add_argument("--clip", type=float, default=1.0)
    g = p.add_argument_group("misc")
    g.add_argument("--backend", default="gloo")
    g.add_argument("--seed", type=int, default=17)
    return p.parse_args(argv)


def setup_logging(rank):
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stdout,
    )


def make_clips(args, n, seed):
    templates = torch.randn(
        args.num_classes, args.mel_bins, args.frames, generator=torch.Generator().manual_seed(5)
    )
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, args.num_classes, (n,), generator=g)
    shift = torch.randint(0, args.frames, (n,), generator=g)
    mel = torch.stack([torch.roll(templates[c], int(s), dims=1) for c, s in zip(label, shift)])
    return TensorDataset(mel + 1.5 * torch.randn(mel.shape, generator=g), label)


class Spotter(nn.Module):
    def __init__(self, args):
        super().__init__()
        c = args.channels
        self.body = nn.Sequential(
            nn.Conv1d(args.mel_bins, c, 5, padding=2, padding_mode="circular"),
            nn.ReLU(),
            nn.Conv1d(c, c, 5, padding=2, padding_mode="circular"),
            nn.ReLU(),
        )
        self.drop = nn.Dropout(args.dropout)
        self.head = nn.Linear(c, args.num_classes)

    def forward(self, mel):
        return self.head(self.drop(self.body(mel).amax(-1)))


def build_optimizer(args, model):
    if args.opt == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.max_lr, weight_decay=args.weight_decay)
    return torch.optim.AdamW(model.parameters(), lr=args.max_lr, weight_decay=args.weight_decay)


def main():
    args = parse_args()
    dist.init_process_group(args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    setup_logging(rank)
    torch.manual_seed(args.seed)
    logger.info("world size %d, pid %d, %s", world, os.getpid(), vars(args))

    train_set = make_clips(args, args.num_clips, seed=1)
    test_set = make_clips(args, 300, seed=2)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(
        train_set, batch_size=args.batch_size_per_gpu, sampler=sampler, num_workers=args.workers
    )

    model = nn.parallel.DistributedDataParallel(Spotter(args))
    torch.manual_seed(args.seed + rank)  # dropout
    optimizer = build_optimizer(args, model)
    steps_per_epoch = math.ceil(len(train_set) / (args.batch_size_per_gpu * world))
    scheduler = OneCycleLR(
        optimizer, args.max_lr, total_steps=args.epochs * steps_per_epoch, pct_start=args.pct_start
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        meter = torch.zeros(2)
        for mel, label in loader:
            loss = criterion(model(mel), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        logger.info("epoch %d train loss %.4f", epoch, meter[0] / meter[1])

    model.eval()
    with torch.no_grad():
        mel, label = test_set[rank::world]
        counts = torch.tensor([(model.module(mel).argmax(1) == label).sum(), len(label)])
    dist.all_reduce(counts)
    logger.info("test accuracy %.4f on %d clips", counts[0] / counts[1], counts[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
