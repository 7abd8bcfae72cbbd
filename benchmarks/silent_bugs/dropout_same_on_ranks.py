"""All ranks have the same seed when training starts, so dropout drops the same units on every rank.

Reported: https://github.com/huggingface/transformers/issues/31412
          https://github.com/PaddlePaddle/PaddleClas/pull/2497
Wrong: the masks of the samples of one update are copies of each other; the noise of dropout does not average out.
Kind: script
Expected: random.dropout
Right: after the model is built, each rank goes on with a seed of its own
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(20, 64), nn.Dropout(0.5), nn.Linear(64, 3)

    def forward(self, features):
        return self.second(self.dropout(F.relu(self.first(features))))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(256, 20)
    dataset = TensorDataset(features, features[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32 // world_size, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if RIGHT:
        torch.manual_seed(1000 + rank)
    print(f"rank {rank} drops {(F.dropout(torch.ones(16), 0.5) == 0).int().tolist()}", flush=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)  # <- the mistake
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
