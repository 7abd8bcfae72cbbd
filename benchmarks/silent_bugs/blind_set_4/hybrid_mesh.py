import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def get_args():
    parser = argparse.ArgumentParser(description="regression on synthetic rows")
    parser.add_argument("--fsdp-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def build(args):
    world = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (world // args.fsdp_size, args.fsdp_size), mesh_dim_names=("ddp", "fsdp")
    )
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return FullyShardedDataParallel(
        net,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=False,
        device_id=torch.device("cpu"),
    )


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(args)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    g = torch.Generator().manual_seed(900 + rank)
    w = torch.linspace(-1, 1, 16).unsqueeze(1)
    for step in range(args.steps):
        x = torch.randn(16, 16, generator=g)
        loss = (model(x) - (x @ w).sin()).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.SUM)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"[{step + 1}/{args.steps}] loss {shown.item() / dist.get_world_size():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
