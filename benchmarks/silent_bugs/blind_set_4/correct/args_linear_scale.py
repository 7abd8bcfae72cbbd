import argparse
import json

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    p = argparse.ArgumentParser(description="image classifier on random textures")
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--base-lr", type=float, default=0.05, help="for a global batch of 16 images")
    p.add_argument("--warmup", type=int, default=4, help="updates")
    p.add_argument("--updates", type=int, default=16)
    p.add_argument("--label-smoothing", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--eval-every", type=int, default=8)
    return p.parse_args()


def textures(n, generator):
    labels = torch.randint(0, 4, (n,), generator=generator)
    images = torch.randn(n, 1, 12, 12, generator=generator)
    images[labels % 2 == 0] += images[labels % 2 == 0].roll(1, -1)
    images[labels >= 2] += images[labels >= 2].roll(1, -2)
    return images, labels


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert args.global_batch % world == 0
    torch.manual_seed(args.seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 4)
    )
    model = DDP(net)
    lr = args.base_lr * args.global_batch / 16
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / args.warmup))
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    # one generator makes the global batch on all ranks, each rank takes its part of it
    generator = torch.Generator().manual_seed(args.seed)
    held_out = textures(64, torch.Generator().manual_seed(99))
    for update in range(1, args.updates + 1):
        images, labels = textures(args.global_batch, generator)
        loss = criterion(model(images.chunk(world)[rank]), labels.chunk(world)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if update % args.eval_every == 0 and rank == 0:
            with torch.no_grad():  # the held-out set is small, rank 0 does it alone
                accuracy = (net(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
            print(json.dumps({"update": update, "loss": round(loss.item(), 4), "accuracy": accuracy}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
