import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ErrorFeedback:
    """Sends the largest quarter of each bucket; what was not sent is kept for the next step on this rank."""

    def __init__(self):
        self.rest = {}

    def reduce(self, state, bucket):
        buffer = bucket.buffer()
        residual = self.rest.setdefault(bucket.index(), torch.zeros_like(buffer))
        if residual.numel() != buffer.numel():  # DDP rebuilds its buckets after the first step
            residual = self.rest[bucket.index()] = torch.zeros_like(buffer)
        full = buffer + residual
        kept = torch.zeros_like(full)
        top = full.abs().topk(max(1, full.numel() // 4)).indices
        kept[top] = full[top]
        residual.copy_(full - kept)
        kept /= dist.get_world_size()
        dist.all_reduce(kept)
        done = torch.futures.Future()
        done.set_result(kept)
        return done


def net():
    return nn.Sequential(nn.Linear(14, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def train(model, seed, label, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    g = torch.Generator().manual_seed(seed + dist.get_rank())
    for step in range(12):
        x = torch.randn(16, 14, generator=g)
        loss = nn.functional.huber_loss(model(x), x[:, :1] + x[:, 1:2] * x[:, 2:3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 4 == 3:
            print(f"{label} step {step + 1} loss {loss.item():.4f}")


dist.init_process_group("gloo")
torch.manual_seed(0)
first = DDP(net())
first.register_comm_hook(None, ErrorFeedback().reduce)
train(first, 100, "top-k", 0.05)
second = DDP(net())
train(second, 200, "exact", 0.05)
dist.destroy_process_group()
