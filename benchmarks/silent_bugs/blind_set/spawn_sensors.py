# Sensor fault detection. Starts its own processes: python spawn_sensors.py --world-size 2
import argparse
import contextlib
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def sensor_data(n=768, length=32):
    g = torch.Generator().manual_seed(21)
    t = torch.linspace(0, 6.28, length)
    phase = torch.rand(n, 1, generator=g) * 6.28
    signal = torch.sin(3 * t + phase) + 0.3 * torch.randn(n, length, generator=g)
    fault = torch.rand(n, generator=g) < 0.4
    signal[fault] += 0.5 * torch.sin(11 * t)
    return TensorDataset(signal[:, None], fault.float())


def build_net():
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(64, 1),
    )


def worker(rank, args, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    dataset = sensor_data()
    sampler = DistributedSampler(dataset, args.world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.micro_batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(build_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    loss_fn = nn.BCEWithLogitsLoss()

    steps_per_epoch = len(loader) // args.accumulate
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        epoch_loss = torch.zeros(())
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            if i >= steps_per_epoch * args.accumulate:
                break
            sync = (i + 1) % args.accumulate == 0
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = loss_fn(model(x).squeeze(1), y) / args.accumulate
                loss.backward()
            epoch_loss += loss.detach()
            if (i + 1) % args.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        epoch_loss /= steps_per_epoch
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch}: loss {epoch_loss.item() / args.world_size:.4f}", flush=True)

    with torch.no_grad():
        x, y = dataset.tensors
        x, y = x[rank :: args.world_size], y[rank :: args.world_size]
        right = ((model.module(x).squeeze(1) > 0) == (y > 0.5)).float().sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"train accuracy {right.item() / len(dataset):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    mp.spawn(worker, args=(args, free_port()), nprocs=args.world_size, join=True)
