"""FSDP2 run described by a config file: torchrun --nproc-per-node 2 c19_config_fsdp2.py [--config FILE] [key=value ...]"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def read_config(path, overrides):
    with open(path) as f:
        cfg = yaml.safe_load(f)
    for item in overrides:
        key, value = item.split("=", 1)
        node = cfg
        *head, last = key.split(".")
        for part in head:
            node = node[part]
        node[last] = yaml.safe_load(value)
    return cfg


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.mix(self.norm(x))[0]
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self, dim, depth, vocab, context):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def batches(cfg, rank):
    g = torch.Generator().manual_seed(cfg["seed"] * 10007 + rank)
    vocab, context = cfg["model"]["vocab"], cfg["model"]["context"]
    for _ in range(cfg["data"]["steps"]):
        start = torch.randint(0, vocab, (cfg["data"]["batch_per_rank"], 1), generator=g)
        rows = (start + 3 * torch.arange(context + 1)) % vocab
        yield rows[:, :-1], rows[:, 1:]


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=os.path.join(here, "c19_config.yaml"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    cfg = read_config(args.config, args.overrides)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = LM(**cfg["model"])
    for layer in model.layers:
        fully_shard(layer.ff, mesh=mesh, reshard_after_forward=cfg["parallel"]["reshard_after_forward"])
    fully_shard(model, mesh=mesh)
    o = cfg["optim"]
    optimizer = getattr(torch.optim, o["name"])(model.parameters(), lr=o["lr"], weight_decay=o["weight_decay"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / cfg["schedule"]["warmup"]))
    for step, (ids, target) in enumerate(batches(cfg, rank)):
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), o["clip"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {value.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
