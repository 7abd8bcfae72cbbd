"""Synchronous parameter server: one process updates the parameters, the others pull them and push gradients.

Run: torchrun --standalone --nproc-per-node 3 parameter_server.py

    rank 0, the server   ── parameters ─►   ranks 1, 2 ..: the trainers, each with its part of the batch
                         ◄── gradients ──

Memory         the server: parameters, optimizer state, and the gradients of all trainers at once; a trainer: parameters
               and gradients
Communication  per update, the server sends the parameters to each trainer. Each trainer sends its gradients, with the
               sum of the loss and the number of samples as two more elements. The traffic of the server grows with the
               number of trainers
Use when       you want to see how a parameter server works. DDP is better for training: it spreads communication evenly
               over the ranks

It uses send and recv. parameter_server_rpc.py does the same with torch.distributed.rpc.

Pitfalls:
- Do not average the mean gradients of the trainers: if their parts of the last batch differ in size, the result is
  wrong. Add up the gradients of the summed losses, then divide once by the total number of samples.
- Only the server has an optimizer. With one on each trainer, momentum would come from local gradients.
- Use group norm. The running statistics of batch norm are buffers, and the trainers send only gradients.

What to change for your own training: build(), load(), and the optimizer of the server. If a trainer dies,
torchrun stops the others (parameter_server_async.py continues without it).
"""

import argparse
import math
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from digits import DistributedBatchSampler, build, count_correct, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all trainers: more trainers do not change it


def serve(model, num_updates, trainers):
    """Run the server: send parameters, add up gradients, make updates. Return the loss of each update."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    losses = []
    for _ in range(num_updates):
        flat = parameters_to_vector(parameters).detach()
        for work in [dist.isend(flat, trainer) for trainer in trainers]:
            work.wait()
        messages = [flat.new_empty(len(flat) + 2) for _ in trainers]
        # in rank order, so that the sum has the same rounding in every run
        for trainer, message in zip(trainers, messages, strict=True):
            dist.recv(message, trainer)
        *gradient_sums, loss, count = sum(messages).split([*(p.numel() for p in parameters), 1, 1])
        for parameter, gradient_sum in zip(parameters, gradient_sums, strict=True):
            parameter.grad = gradient_sum.view_as(parameter) / count  # a sum over all samples becomes their mean
        optimizer.step()
        losses.append(loss / count)
    return torch.cat(losses)


def train(model, data, index, num_trainers, device):
    """Run a trainer: receive parameters, compute gradients of its part of each batch, send them."""
    parameters = list(model.parameters())
    flat = parameters_to_vector(parameters).detach()
    sampler = DistributedBatchSampler(len(data), BATCH, index, num_trainers)
    loader = DataLoader(data, batch_sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        for images, labels in loader:
            dist.recv(flat, 0)
            vector_to_parameters(flat, parameters)
            loss = F.cross_entropy(model(images.to(device)), labels.to(device), reduction="sum")
            gradients = torch.autograd.grad(loss, parameters)
            loss_and_count = flat.new_tensor([loss.item(), len(labels)])
            dist.send(torch.cat([*(gradient.reshape(-1) for gradient in gradients), loss_and_count]), 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    num_trainers = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if num_trainers < 1:
        raise SystemExit(
            "This script needs at least 2 ranks: rank 0 is the server, the others are trainers. "
            "Run: torchrun --standalone --nproc-per-node 3 parameter_server.py"
        )
    # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(minutes=5), device_id=device if cuda else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, eval_data = load(dtype)
    model = build().to(device, dtype)
    if rank == 0:
        losses = serve(model, EPOCHS * math.ceil(len(train_data) / BATCH), range(1, world_size))
        for epoch, epoch_losses in enumerate(losses.view(EPOCHS, -1)):
            print_losses(epoch, epoch_losses, every_update=args.float64)
    else:
        train(model, train_data, rank - 1, num_trainers, device)
    # All ranks need the final parameters, for the evaluation.
    flat = parameters_to_vector(model.parameters()).detach()
    dist.broadcast(flat, 0)
    vector_to_parameters(flat, model.parameters())
    correct = count_correct(model, eval_data, device, rank, world_size)
    dist.all_reduce(correct)
    if rank == 0:
        print(f"top1 {correct.item() / len(eval_data):.4f}")
    time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
