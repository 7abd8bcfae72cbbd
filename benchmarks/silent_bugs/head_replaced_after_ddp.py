"""The head of a pretrained model is replaced after the model was wrapped in DDP, which never learns of the new one.

Reported: https://github.com/pytorch/pytorch/issues/12603
          https://github.com/pytorch/pytorch/issues/104336
Wrong: the gradients of the new head are not averaged and its initial weights not broadcast: it differs on every rank.
Kind: script
Expected: gradient.unsynced
Right: replace first, wrap afterwards
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RIGHT = "--right" in sys.argv


class Pretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 40), nn.ReLU())
        self.head = nn.Linear(40, 10)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(384, 20)
    labels = features[:, :3].argmax(1)
    model = Pretrained()
    for parameter in model.head.parameters():
        parameter.requires_grad = False  # it goes anyway
    if RIGHT:
        model.head = nn.Linear(40, 3)
    ddp = DistributedDataParallel(model)
    if not RIGHT:
        model.head = nn.Linear(40, 3)  # <- the mistake
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(range(320))
    loader = DataLoader(TensorDataset(features, labels), 32 // world_size, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            held_out = F.cross_entropy(model(features[320:]), labels[320:])
        print(f"rank {rank} epoch {epoch} held-out loss {held_out:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
