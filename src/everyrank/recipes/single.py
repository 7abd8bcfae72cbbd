"""One process on one device: the training that the other scripts distribute, with the same losses.

Run: python single.py

Memory         everything, on one device
Communication  nothing
Use when       one device is enough. Run it first, for losses to compare with: python single.py --float64

What to change for your own training:
- Replace load() and build() by your data and your network. If samples have to be decoded, set num_workers.
- Use pin_memory and non_blocking together: the CPU continues while a batch is copied to the GPU.
- cross_entropy averages over the samples of the batch. With tokens or masks, divide the sum of the loss by the number
  of its terms. Micro-batches and ranks can then add up their sums. A mean of their means is a different number.
- Do not read a tensor inside the loop (.item(), print), because the CPU would wait for the device each time.
- With --float64 the scripts agree to about 1e-12. In float32 they differ by rounding.
"""

import argparse
import csv
import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0


def load(dtype):
    """Return training and evaluation data: images of shape (1, 8, 8) with values from 0 to 1, and their labels."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)])
    images, labels = (rows[:, :64] / 16).to(dtype).reshape(-1, 1, 8, 8), rows[:, 64]
    is_eval = torch.arange(len(rows)) % 5 == 4  # every fifth image
    return TensorDataset(images[~is_eval], labels[~is_eval]), TensorDataset(images[is_eval], labels[is_eval])


def build():
    """Return a convolutional network, (N, 1, 8, 8) -> (N, 10), with the same weights in every run."""

    def block(in_channels, out_channels, stride):
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        # Group norm has no statistics over samples, so that ranks have nothing to synchronize.
        return nn.Sequential(convolution, nn.GroupNorm(4, out_channels), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))


@torch.no_grad()
def evaluate(model, data, device):
    """Return the fraction of correctly classified images."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(data, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    model.train()
    return correct.item() / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_data, eval_data = load(dtype)
    generator = torch.Generator()
    sampler = RandomSampler(train_data, generator=generator)
    loader = DataLoader(train_data, BATCH, sampler=sampler, pin_memory=device.type == "cuda")
    model = build().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # a resumed run then has the same order of samples
        losses = []
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

        # Read the losses only now: in the loop, .item() would make the CPU wait for the device.
        losses = torch.stack(losses).tolist()
        if args.float64:
            for index, loss in enumerate(losses):
                print(f"update {epoch * len(losses) + index} loss {loss}")
        else:
            print(f"epoch {epoch + 1} loss {sum(losses) / len(losses):.4f}")

    print(f"top1 {evaluate(model, eval_data, device):.4f}")


if __name__ == "__main__":
    main()
