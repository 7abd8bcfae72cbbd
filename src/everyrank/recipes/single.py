"""One process, one device: the training that every other recipe distributes, number for number.

Run: python single.py

What to change for your own training:
- load() and build() are your data and your network; a DataLoader takes the batches as its batch_sampler.
- Add the loss up over its terms, and divide once, by their number: with tokens or masks that is not the
  number of samples. A sum can be cut over micro-batches and ranks, a mean of means can not.
- Read no tensor inside the loop (.item(), print): each time the CPU would wait for the device.
"""

import csv
import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

EPOCHS = 2
BATCH = 64  # samples of one update
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster


def load(device, held_out):
    """Real handwritten digits: images (N, 1, 8, 8) from 0 to 1, labels (N,). Every fifth one is held out."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = torch.tensor([[int(cell) for cell in row] for row in csv.reader(file)], device=device)
    rows = rows[(torch.arange(len(rows), device=device) % 5 == 4) == held_out]
    return (rows[:, :64] / 16).to(DTYPE).reshape(-1, 1, 8, 8), rows[:, 64]


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
def evaluate(model, device):
    """The fraction of the held-out images that are read right."""
    images, labels = load(device, held_out=True)
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for batch in torch.arange(len(images), device=device).split(BATCH):
        right += (model(images[batch]).argmax(1) == labels[batch]).sum()
    return right.item() / len(images)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = load(device, held_out=False)
    model = build().to(device, DTYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # Another order in every epoch, a function of seed and epoch alone. The smaller last batch is kept.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            loss = F.cross_entropy(model(images[batch]), labels[batch], reduction="sum")
            optimizer.zero_grad()
            (loss / len(batch)).backward()
            optimizer.step()
            sums[index] = loss.detach()

        # The losses stayed on the device until now: reading one in the loop would make the CPU wait for it.
        for index, total in enumerate(sums.tolist()):
            print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    print(f"top1 {evaluate(model, device)}")


if __name__ == "__main__":
    main()
