"""A helper wraps the model in DDP only when it is asked to, and one of the two losses goes round the wrapper.

Reported: https://x.com/jxmnop/status/1778520637193240892
          https://github.com/OrderLab/TrainCheck-Evaluation-Workloads (x-jxmnop-ddp-out-of-sync)
Wrong: every other update steps with the gradient of one rank alone, and the ranks drift apart.
Kind: script
Expected: replicas.unwrapped
Right: one wrapper, made once, for all updates
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv


def make_batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    points = torch.rand(64, 2, generator=generator) * 2 - 1
    return points[rank::world_size], torch.sin(3 * points[rank::world_size]).prod(1, keepdim=True)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.wrapped = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def get_model(self, denoise):
        """The denoising loss was written against the plain model."""
        return self.wrapped if RIGHT or not denoise else self.model

    def train_step(self, points, values, step):
        denoise = step % 2 == 1
        if denoise:
            points = points + 0.05 * torch.sin(40 * points)
        loss = F.mse_loss(self.get_model(denoise)(points), values)  # <- the mistake
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
    for step in range(60):
        loss = trainer.train_step(*make_batch(step, rank, world_size), step)
        if rank == 0 and step % 12 == 11:
            print(f"step {step} loss {loss:.6f}")
    with torch.no_grad():
        points, values = make_batch(999, 0, 1)
        print(f"rank {rank} test loss {F.mse_loss(trainer.model(points), values):.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
