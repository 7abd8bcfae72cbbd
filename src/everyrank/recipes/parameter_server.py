"""Parameter server: one process holds the model, the others pull its parameters and push gradients. Synchronous.

Run: torchrun --standalone --nproc-per-node 3 parameter_server.py

    rank 0, the server   ── parameters ─►   ranks 1, 2 ..: the trainers, each with its part of the batch
                         ◄── gradients ──

Holds     the server: parameters, gradients, optimizer state; a trainer: parameters and gradients
Travels   per update, between the server and each trainer: the parameters one way, the gradients the other, with the sum
          of the loss and its number of samples in two elements more. At the server that grows with the trainers
Use when  hardly ever in place of DDP, whose ranks share the traffic evenly; to see what a parameter server is

Plain sends and receives: nothing here needs torch.distributed.rpc (parameter_server_rpc.py is the same with it).

What goes wrong:
- Gradients averaged over trainers, whose parts of the last batch differ in size: add up sums, divide by all samples.
- An optimizer on each trainer: its momentum is of its own gradients alone. The server has the only one.
- Batch norm: its running statistics are buffers, and no gradient carries them. Use a norm of single samples.

What to change for your own training: build(), load(), and the optimizer of the server. A trainer that dies ends all:
torchrun stops the others (parameter_server_async.py goes on without it).
"""

import argparse
import csv
import gzip
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 2
BATCH = 64  # samples of one update, over all trainers together: it does not change with their number
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
def evaluate(model, data, rank, world_size, device):
    """The fraction of the images that are classified correctly; a collective: every rank calls it."""
    model.eval()
    own = Subset(data, range(rank, len(data), world_size))  # DistributedSampler would count some images twice
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(own, BATCH):
        correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    model.train()
    return correct.item() / len(data)


def serve(model, num_updates, trainers):
    """Give every trainer the parameters, add up what they push, make one update of it."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    for update in range(num_updates):
        flat = parameters_to_vector(parameters).detach()
        for work in [dist.isend(flat, trainer) for trainer in trainers]:
            work.wait()
        pushed = [flat.new_empty(len(flat) + 2) for _ in trainers]
        for trainer, message in zip(trainers, pushed, strict=True):  # in this order: sums are the same in every run
            dist.recv(message, trainer)
        *gradient, loss, count = sum(pushed).split([*(p.numel() for p in parameters), 1, 1])
        for parameter, values in zip(parameters, gradient, strict=True):
            parameter.grad = values.view_as(parameter) / count  # a sum over samples of all trainers, divided once
        optimizer.step()
        print(f"update {update} loss {(loss / count).item()}")


def train(model, data, index, num_trainers, device):
    """Pull, compute the gradients of this trainer's part of the batch, push."""
    parameters = list(model.parameters())
    flat = parameters_to_vector(parameters).detach()
    sampler = DistributedSampler(data, num_trainers, index, seed=SEED)
    loader = DataLoader(data, BATCH // num_trainers, sampler=sampler)
    num_own = len(range(index, len(data), num_trainers))  # without samples that are repeated to make trainers even
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the order of the first
        for number, (images, labels) in enumerate(loader):
            dist.recv(flat, 0)
            vector_to_parameters(flat, parameters)
            losses = F.cross_entropy(model(images.to(device)), labels.to(device), reduction="none")
            losses = losses[: num_own - number * loader.batch_size]
            gradients = torch.autograd.grad(losses.sum(), parameters)
            tail = flat.new_tensor([losses.sum().item(), len(losses)])
            dist.send(torch.cat([*(gradient.reshape(-1) for gradient in gradients), tail]), 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="to compare losses with any other way of running")
    dtype = torch.float64 if parser.parse_args().float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    num_trainers = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if num_trainers < 1 or BATCH % num_trainers:
        raise SystemExit(f"BATCH={BATCH}: {num_trainers} trainers, all ranks of torchrun but one, must divide it")
    # Address and ranks come from torchrun, in the environment. The timeout ends a wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, held_out = load(dtype)
    model = build().to(device, dtype)
    if rank == 0:
        serve(model, EPOCHS * -(-len(train_data) // BATCH), range(1, world_size))
    else:
        train(model, train_data, rank - 1, num_trainers, device)
    # After the last update everyone needs the parameters, for the evaluation.
    flat = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(flat, 0)
    vector_to_parameters(flat, model.parameters())
    top1 = evaluate(model, held_out, rank, world_size, device)
    if rank == 0:
        print(f"top1 {top1}")
    time.sleep(0.1)  # for gloo's threads: the end of ddp_torchrun.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
