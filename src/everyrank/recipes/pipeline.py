"""Pipeline parallelism (1F1B): each rank has some of the layers, and micro-batches pass from rank to rank.

Run: torchrun --standalone --nproc-per-node 2 pipeline.py

Memory         some layers on every rank, with their gradients and optimizer state
Communication  per micro-batch, activations to the next stage, and their gradients back
Use when       the model does not fit on one device and connections are slow. Pipelines send little, and only between
               neighbours

What to change for your own training:
- build() returns the layers in order. A stage has one or several layers, and the slowest stage limits the speed. Stages
  pass one tensor, with a row for each sample. If two stages share a weight, add up its gradients.
- With p stages, each is idle (p - 1) / (MICRO_BATCHES + p - 1) of the time. Here micro-batches may differ in size;
  torch.distributed.pipelining needs equal sizes. With batch norm, the training is not equivalent to one device.
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
    """Return a small convolutional network, (N, 1, 8, 8) -> (N, 10), as a list; the same weights in every process."""

    def block(in_channels, out_channels, stride):
        convolution = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, out_channels), nn.ReLU())

    torch.manual_seed(SEED)
    blocks = block(1, 16, 1), block(16, 32, 2), block(32, 64, 1)
    return [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 10))]


class Stage:
    """The layers of this rank, between the previous stage (rank - 1) and the next (rank + 1)."""

    def __init__(self, rank, world_size, device, dtype):
        layers = build()  # every rank builds all layers, so that the weights do not depend on the split
        local_indices = [index for index in range(len(layers)) if index * world_size // len(layers) == rank]
        # Earlier layers give the shape of an input sample, so ranks need not send it.
        self.shape = nn.Sequential(*layers[: local_indices[0]])(torch.zeros(1, 1, 8, 8)).shape[1:]
        self.layers = nn.Sequential(*(layers[index] for index in local_indices)).to(device, dtype)
        self.rank, self.num_later, self.device, self.dtype = rank, world_size - 1 - rank, device, dtype
        # Each direction has a group, because with NCCL messages of two ranks in one group share a queue.
        # A group does not inherit the timeout of init_process_group.
        self.to_next, self.to_previous = (dist.new_group(timeout=timedelta(minutes=5)) for _ in range(2))

    def forward(self, images):
        """Return the input and output of this stage for a micro-batch, and the isend to the next stage."""
        inputs = images.to(self.device, non_blocking=True)
        if self.rank:
            inputs = torch.empty(len(images), *self.shape, dtype=self.dtype, device=self.device)
            dist.recv(inputs, self.rank - 1, self.to_next)
            inputs.requires_grad_(torch.is_grad_enabled())
        output = self.layers(inputs)
        # isend does not block. send would wait for the receiver, which may wait to send a gradient to this rank.
        sending = dist.isend(output.detach().contiguous(), self.rank + 1, self.to_next) if self.num_later else None
        return inputs, output, sending

    def backward(self, inputs, output, sending):
        """Add to the gradients of the parameters, and send the gradient of the input to the previous stage."""
        gradient = None  # of a scalar: the output of the last stage is the loss
        if self.num_later:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + 1, self.to_previous)
            sending.wait()  # returns at once, because the gradient of this output has arrived
        output.backward(gradient)
        if self.rank:
            dist.send(inputs.grad, self.rank - 1, self.to_previous)

    def train(self, images, labels):
        """Add the gradients of the mean loss over a batch. Return this loss on the last stage, 0 on the others."""
        batch_loss, in_flight = 0, deque()
        micro_batches = zip(images.tensor_split(MICRO_BATCHES), labels.tensor_split(MICRO_BATCHES), strict=True)
        # 1F1B: a stage warms up with a forward for each later stage, alternates forward and backward, and ends with the
        # remaining backwards. At most num_later + 1 micro-batches have their activations in memory.
        warmup = min(self.num_later, MICRO_BATCHES)
        for step in "F" * warmup + "FB" * (MICRO_BATCHES - warmup) + "B" * warmup:
            if step == "B":
                self.backward(*in_flight.popleft())
                continue
            micro_images, micro_labels = next(micro_batches)
            inputs, output, sending = self.forward(micro_images)
            if not self.num_later:
                micro_labels = micro_labels.to(self.device, non_blocking=True)
                # Divide by the size of the whole batch, so that the micro-batches add up to its mean.
                output = F.cross_entropy(output, micro_labels, reduction="sum") / len(labels)
                batch_loss += output.detach()
            in_flight.append((inputs, output, sending))
        return batch_loss


@torch.no_grad()
def evaluate(stage, data, device):
    """Return the fraction of correctly classified images. The last stage counts them, the others add 0."""
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
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
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
    # All stages draw the same order from one seed. The first stage uses the images, the last one the labels.
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

        dist.all_reduce(losses)  # the last stage has the losses, the others add 0
        if rank == 0:
            print_losses(epoch, losses, every_update=args.float64)

    top1 = evaluate(stage, eval_data, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
