"""Pipeline parallelism: each rank has some of the layers, and the batch passes through in micro-batches (1F1B).

Run: torchrun --standalone --nproc-per-node 2 pipeline.py

Memory         some layers on every rank, with their gradients and optimizer state
Communication  per micro-batch the activations between neighbours, forward to the next stage, their gradients back
Use when       the model does not fit on one device and connections are slow: little is sent, and only between
               neighbours

What to change for your own training:
- build() returns the layers in order. A stage has one or several; the slowest stage determines the speed. One tensor
  passes between stages, with a row for each sample. If two stages share a weight, add up its gradients.
- MICRO_BATCHES: of p stages each idles (p - 1) / (MICRO_BATCHES + p - 1) of the time. They may differ in size, where
  the schedules in torch.distributed.pipelining want all of one size. With batch norm it is not equivalent.
"""

import argparse
import os
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from digits import load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update
SEED = 0
MICRO_BATCHES = 7  # one of 10 samples and six of 9


def build():
    """A small convolutional network, (N, 1, 8, 8) -> (N, 10), as a list; the same weights in every process."""

    def block(in_channels, out_channels, stride):
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, out_channels), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))]


class Stage:
    """The layers of this rank, between the previous stage (rank - 1) and the next (rank + 1)."""

    def __init__(self, rank, world_size, device, dtype):
        layers = build()  # all of them on every rank, so that all draw the same weights
        local_indices = [index for index in range(len(layers)) if index * world_size // len(layers) == rank]
        # The shape of one sample as the earlier layers return it, so that no message has to carry it.
        self.shape = nn.Sequential(*layers[: local_indices[0]])(torch.zeros(1, 1, 8, 8)).shape[1:]
        self.layers = nn.Sequential(*(layers[index] for index in local_indices)).to(device, dtype)
        self.rank, self.num_later, self.device, self.dtype = rank, world_size - 1 - rank, device, dtype
        # A group for each direction: on NCCL, messages of two ranks in one group wait in one queue.
        self.to_next, self.to_previous = dist.new_group(), dist.new_group()

    def forward(self, images):
        """Input and output of this stage for a micro-batch, and the message that carries the output to the next one."""
        inputs = images.to(self.device, non_blocking=True)
        if self.rank:
            inputs = torch.empty(len(images), *self.shape, dtype=self.dtype, device=self.device)
            dist.recv(inputs, self.rank - 1, self.to_next)
            inputs.requires_grad_(torch.is_grad_enabled())
        output = self.layers(inputs)
        # isend, because send waits for the receiver, which may be waiting to send a gradient to this rank.
        sending = dist.isend(output.detach().contiguous(), self.rank + 1, self.to_next) if self.num_later else None
        return inputs, output, sending

    def backward(self, inputs, output, sending):
        """Adds to the gradients of the parameters, and sends that of the input to the previous stage."""
        gradient = None  # the last stage's output is the loss
        if self.num_later:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + 1, self.to_previous)
            sending.wait()  # takes no time: its gradient has come back
        output.backward(gradient)
        if self.rank:
            dist.send(inputs.grad, self.rank - 1, self.to_previous)

    def train(self, images, labels):
        """Adds the gradients of the mean loss over a batch. Returns that loss on the last stage, 0 on the others."""
        batch_loss, in_flight = 0, deque()
        micro_batches = zip(images.tensor_split(MICRO_BATCHES), labels.tensor_split(MICRO_BATCHES), strict=True)
        # 1F1B: a forward for each later stage to warm up, then one forward and one backward in turn, then the remaining
        # backwards. Never more than num_later + 1 micro-batches have their activations in memory.
        warmup = min(self.num_later, MICRO_BATCHES)
        for step in "F" * warmup + "FB" * (MICRO_BATCHES - warmup) + "B" * warmup:
            if step == "B":
                self.backward(*in_flight.popleft())
                continue
            micro_images, micro_labels = next(micro_batches)
            inputs, output, sending = self.forward(micro_images)
            if not self.num_later:
                micro_labels = micro_labels.to(self.device, non_blocking=True)
                # Divided by the size of the whole batch, so that the micro-batches add up to its mean.
                output = F.cross_entropy(output, micro_labels, reduction="sum") / len(labels)
                batch_loss += output.detach()
            in_flight.append((inputs, output, sending))
        return batch_loss


@torch.no_grad()
def evaluate(stage, data, device):
    """The fraction of the images that are classified correctly; the last stage counts, the others add 0."""
    stage.layers.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(data, BATCH):
        _, output, sending = stage.forward(images)
        if sending:
            sending.wait()
        else:
            correct += (output.argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    stage.layers.train()
    return correct.item() / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "0"))
    num_layers = len(build())
    if not 1 <= world_size <= num_layers:
        if rank == 0:
            message = f"needs 1 to {num_layers} ranks, one layer or more on each, got {world_size}"
            sys.stderr.write(f"{Path(__file__).name}: {message}\n")
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    train_data, eval_data = load(dtype)
    # All stages draw the same order from one seed: the first uses the images, the last the labels.
    generator = torch.Generator()
    sampler = RandomSampler(train_data, generator=generator)
    loader = DataLoader(train_data, BATCH, sampler=sampler, pin_memory=cuda)
    stage = Stage(rank, world_size, device, dtype)
    optimizer = torch.optim.SGD(stage.layers.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    for epoch in range(EPOCHS):
        generator.manual_seed(SEED + epoch)  # a different order in each epoch
        losses = torch.zeros(len(loader), dtype=torch.float64, device=device)
        for index, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            losses[index] = stage.train(images, labels)
            optimizer.step()

        dist.all_reduce(losses)  # from the last stage, which has them, to rank 0; the others add 0
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    top1 = evaluate(stage, eval_data, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
