"""The loss is computed with parts taken out of the DDP wrapper, so DDP never hears of that backward.

Reported: https://github.com/intel/e2eAIOK/pull/198
          https://github.com/rosinality/swapping-autoencoder-pytorch/issues/22
Wrong: no gradient is averaged: each rank trains a model of its own, on its own share of the data.
Kind: script
Expected: replicas.unwrapped
Right: both losses come out of the forward of the wrapped model
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


class Adapter(nn.Module):
    """A classifier, and a discriminator that tells from which of two domains the features come."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.classifier, self.discriminator = nn.Linear(32, 4), nn.Linear(32, 2)

    def forward(self, features):
        encoded = self.encoder(features)
        return self.classifier(encoded), self.discriminator(encoded)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    features = torch.randn(384, 16)
    labels, domains = features[:, :4].argmax(1), (features[:, 4] > 0).long()
    sampler = DistributedSampler(range(320))
    loader = DataLoader(TensorDataset(features, labels, domains), 32 // world_size, sampler=sampler)
    model = DistributedDataParallel(Adapter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    adapter = model if RIGHT else model.module
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, label, domain in loader:
            classes, domain_logits = adapter(inputs)  # <- the mistake
            loss = F.cross_entropy(classes, label) + 0.5 * F.cross_entropy(domain_logits, domain)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        held_out = F.cross_entropy(model.module(features[320:])[0], labels[320:])
    print(f"rank {rank} held-out loss {held_out:.6f}", flush=True)
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
