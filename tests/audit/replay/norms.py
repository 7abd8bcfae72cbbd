"""A network with batch norm under DistributedDataParallel; two backwards an update."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE, SIZE = 2, 5


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.norm, self.after = nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.after(self.norm(self.before(inputs)).relu().mean(-1))


def get_batch():
    return torch.randn(SIZE, 2, 8), torch.randint(0, 3, (SIZE,))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = Network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)
    for _ in range(4):
        optimizer.zero_grad()
        for index in range(ACCUMULATE):
            inputs, labels = get_batch()
            with contextlib.nullcontext() if index == ACCUMULATE - 1 else model.no_sync():
                loss = F.cross_entropy(model(inputs), labels)
                (loss / ACCUMULATE).backward()
        optimizer.step()
    print([tensor.double().sum().item() for tensor in model.state_dict().values()], torch.randn(1).item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
