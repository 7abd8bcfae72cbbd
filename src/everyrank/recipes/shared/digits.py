"""Data, network and helpers of the scripts next to this file: handwritten digits and a small convolutional network.

Replace load() and build() by your own data and network. The rest works for any dataset of (input, label).
"""

import csv
import gzip
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

SEED = 0


def load(dtype):
    """Training data and evaluation data: images of shape (1, 8, 8) with values from 0 to 1, and their labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    images, labels = (rows[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), rows[:, 64]
    is_eval = torch.arange(len(rows)) % 5 == 4  # every fifth image
    return TensorDataset(images[~is_eval], labels[~is_eval]), TensorDataset(images[is_eval], labels[is_eval])


def build():
    """A convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every process."""

    def block(in_channels, out_channels, stride):
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        # Group norm has no statistics over samples, so that ranks have nothing to synchronize.
        return nn.Sequential(convolution, nn.GroupNorm(4, out_channels), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


class DistributedBatchSampler(Sampler):
    """Yields this rank's part of each batch, as a list of indices: the batch_sampler of a DataLoader.

    Each sample is used once per epoch, and the last batch is smaller. DistributedSampler repeats samples so that all
    ranks have equally many; these samples would count twice in the gradient.
    """

    def __init__(self, num_samples, batch_size, rank, world_size):
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self.num_samples, self.batch_size = num_samples, batch_size
        self.batch_sizes = [min(batch_size, num_samples - start) for start in range(0, num_samples, batch_size)]
        smallest = min(self.batch_sizes)
        if smallest < world_size:
            raise SystemExit(
                f"{world_size} ranks share a batch of {smallest} samples: use fewer, or another batch size"
            )

    def set_epoch(self, epoch):
        """Select the order of the samples: without this call every epoch has the same order."""
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(SEED + self.epoch))
        for batch in order.split(self.batch_size):
            yield batch.tensor_split(self.world_size)[self.rank].tolist()

    def __len__(self):
        return len(self.batch_sizes)


@torch.no_grad()
def count_correct(model, data, device, rank=0, world_size=1):
    """The number of images of this rank that are classified correctly, as a tensor: the sum over ranks is exact.

    All ranks call the model equally often, because the forward pass of some models (FSDP) waits for all ranks.
    """
    model.eval()
    local_batches = [batch.tensor_split(world_size)[rank].tolist() for batch in torch.arange(len(data)).split(64)]
    # A rank without a sample in the last batch classifies image 0 and does not count it.
    loader = DataLoader(data, batch_sampler=[indices or [0] for indices in local_batches])
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for (images, labels), indices in zip(loader, local_batches, strict=True):
        predicted = model(images.to(device)).argmax(1)
        correct += (predicted.to(device) == labels.to(device))[: len(indices)].sum()
    model.train()
    return correct


def print_losses(epoch, losses, every_update, first_update=None):
    """Print the mean loss of an epoch, or with --float64 the loss of every update, to compare two scripts.

    Pass `first_update` if the losses do not begin with the first update of the epoch.
    """
    if every_update:
        start = epoch * len(losses) if first_update is None else first_update
        for update, loss in enumerate(losses.tolist(), start):
            print(f"update {update} loss {loss}")
    else:
        print(f"epoch {epoch + 1} loss {losses.mean().item():.4f}")
