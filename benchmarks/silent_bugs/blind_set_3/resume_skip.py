"""Fine-tuning with preemption: the run stops after --stop-at updates, restarts from its checkpoint and finishes."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_dataset():
    g = torch.Generator().manual_seed(21)
    x = torch.randn(320, 16, generator=g)
    w = torch.randn(16, 1, generator=g)
    return TensorDataset(x, x @ w + 0.1 * torch.randn(320, 1, generator=g))


def build():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    return model, torch.optim.Adam(model.parameters(), lr=3e-3)


def save(path, model, optimizer, step):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    dist.barrier()


def train(args, path, resume):
    dataset = get_dataset()
    sampler = DistributedSampler(dataset, seed=7, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model, optimizer = build()
    steps_per_epoch = len(loader)
    completed_steps, starting_epoch, resume_step = 0, 0, None
    if resume:
        ckpt = torch.load(path, weights_only=True)
        model.module.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        completed_steps = ckpt["step"]
        starting_epoch = completed_steps // steps_per_epoch
        resume_step = completed_steps % steps_per_epoch

    for epoch in range(starting_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if resume_step is not None and epoch == starting_epoch and step < resume_step:
                continue
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            completed_steps += 1
            if not resume and completed_steps == args.stop_at:
                save(path, model, optimizer, completed_steps)
                return
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done, {completed_steps} updates, loss {loss.item():.4f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--stop-at", type=int, default=14)
    args = p.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "last.pt")
    train(args, path, resume=False)
    train(args, path, resume=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
