"""nn.DataParallel: one process, several CUDA devices; the network is copied to all of them in every update.

Run: python dataparallel.py

What to change for your own training:
- Take ddp_torchrun.py instead. PyTorch advises it on one machine too: no copies, an interpreter per device.
- The loss is computed here, over the gathered output: a mean taken on each device would be a mean of means.
- Save model.state_dict(), not parallel.state_dict(), whose names begin with "module.".
"""

import csv
import gzip
import sys
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
    num_devices = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_devices else torch.device("cpu")
    images, labels = load(device, held_out=False)
    model = build().to(device, DTYPE)
    parallel = model
    if num_devices >= 2:
        # Inputs are cut over device_ids; outputs are gathered on output_device, where the parameters live.
        parallel = nn.DataParallel(model, device_ids=list(range(num_devices)), output_device=0)
    else:
        print(f"DataParallel needs 2 CUDA devices, found {num_devices}: using {device}", file=sys.stderr)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        # Another order in every epoch, a function of seed and epoch alone. The smaller last batch is kept.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH)
        sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
        for index, batch in enumerate(batches):
            loss = F.cross_entropy(parallel(images[batch]), labels[batch], reduction="sum")
            optimizer.zero_grad()
            (loss / len(batch)).backward()
            optimizer.step()
            sums[index] = loss.detach()

        # The losses stayed on the device until now: reading one in the loop would make the CPU wait for it.
        for index, total in enumerate(sums.tolist()):
            print(f"update {epoch * len(batches) + index} loss {total / len(batches[index])}")

    print(f"top1 {evaluate(parallel, device)}")


if __name__ == "__main__":
    main()
