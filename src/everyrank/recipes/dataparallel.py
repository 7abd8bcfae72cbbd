"""nn.DataParallel: one process, several CUDA devices; the network is copied to all of them in every update.

Run: python dataparallel.py

Holds     the model, gradients and optimizer state, on the first device; copies of the model on the others
Travels   per update: parameters and inputs from the first device to all, outputs and gradients back to it
Use when  never in new code: ddp_torchrun.py is faster on one machine too (no copies, one interpreter per device)

What to change for your own training:
- The loss is computed here, over the gathered output: a mean taken on each device would be a mean of means.
- Save model.state_dict(), not parallel.state_dict(), whose names begin with "module.".
"""

import argparse
import csv
import gzip
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update
SEED = 0


def load(dtype):
    """Real handwritten digits for training and, every fifth, held out: images (1, 8, 8) from 0 to 1, and labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    images, labels = (rows[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), rows[:, 64]
    held_out = torch.arange(len(rows)) % 5 == 4
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every process."""

    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        # Group norm: its statistics do not span samples, so nothing needs synchronising across ranks.
        return nn.Sequential(convolution, nn.GroupNorm(4, after), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


@torch.no_grad()
def evaluate(model, data, device):
    """The fraction of the images that are classified correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(data, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    return correct.item() / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    num_devices = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_devices else torch.device("cpu")
    train_data, held_out = load(dtype)
    generator = torch.Generator()
    sampler = RandomSampler(train_data, generator=generator)
    loader = DataLoader(train_data, BATCH, sampler=sampler, pin_memory=device.type == "cuda")
    model = build().to(device, dtype)
    parallel = model
    if num_devices >= 2:
        # Inputs are cut over device_ids; outputs are gathered on output_device, where the parameters live.
        parallel = nn.DataParallel(model, device_ids=list(range(num_devices)), output_device=0)
    else:
        print(f"DataParallel needs 2 CUDA devices, found {num_devices}: using {device}", file=sys.stderr)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # the order is a function of seed and epoch: DistributedSampler's, too
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(parallel(images), labels, reduction="sum")
            optimizer.zero_grad()
            (loss / len(labels)).backward()  # the last batch is smaller, and not dropped
            optimizer.step()
            losses[index] = loss.detach() / len(labels)

        # The losses stayed on the device until now: reading one in the loop would make the CPU wait for it.
        for index, loss in enumerate(losses.tolist()):
            print(f"update {epoch * len(loader) + index} loss {loss}")

    print(f"top1 {evaluate(parallel, held_out, device)}")


if __name__ == "__main__":
    main()
