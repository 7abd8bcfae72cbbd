"""Ring all-reduce, written with send and recv, in a small data parallel training.

Run: torchrun --standalone --nproc-per-node 2 ring_allreduce.py

`python ring_allreduce.py` trains the same network in one process.

Memory         the whole model, its gradients and the optimizer state, on every rank, as in DDP
Communication  the gradients in N chunks, to the next rank in 2 (N - 1) steps: a rank sends 2 (N - 1) / N times the size
               of the gradients
Use when       you want to see how dist.all_reduce and DistributedDataParallel work. For training, these are faster

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks; any number of ranks works.
- Each rank divides its loss by the size of the whole batch, so that the sum over ranks is the mean over the batch. A
  mean of the local means is different if one rank has fewer samples.
- This script sends all gradients in one piece after backward. DDP sends them in buckets while backward still runs.
- Each step waits for a neighbour, so a small tensor costs 2 (N - 1) latencies. A tree of ranks is faster for these.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from digits import build, load, print_losses

EPOCHS = 2
BATCH = 64  # samples per update, over all ranks: more ranks do not change it
SEED = 0
ROUNDING = {
    torch.float32: 1e-5,
    torch.float64: 1e-13,
}  # largest difference of sums in a different order: a few units in the last place


def ring_all_reduce(tensor, rank, world_size):
    """Replace `tensor`, of shape (length,), by its sum over all ranks. For example, three ranks with chunks a b c:

              rank 0          rank 1          rank 2
    start     a0  b0  c0      a1  b1  c1      a2  b2  c2
    step 1    a0 ->           b1 ->           c2 ->            to the next rank, which adds it to its own chunk
              a0  b0  c02     a01 b1  c1      a2  b12 c2
    step 2    c02 ->          a01 ->          b12 ->
              a0  B   c02     a01 b1  C       A   b12 c2       each rank has one chunk of the sum
    step 3    B ->            C ->            A ->             the chunks of the sum go around and are copied
    step 4    A ->            B ->            C ->
    end       A   B   C       A   B   C       A   B   C
    """
    next_rank, previous = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)  # views: writing to a chunk changes the tensor

    def send_and_receive(outgoing, incoming):
        # isend does not block. With send, every rank would wait for a receiver.
        sending = dist.isend(outgoing, next_rank)
        dist.recv(incoming, previous)
        sending.wait()

    for step in range(world_size - 1):  # reduce-scatter
        local_chunk = chunks[(rank - step - 1) % world_size]
        received = torch.empty_like(local_chunk)
        send_and_receive(chunks[(rank - step) % world_size], received)
        local_chunk += received
    for step in range(world_size - 1):  # all-gather
        send_and_receive(chunks[(rank + 1 - step) % world_size], chunks[(rank - step) % world_size])


def fail(message):
    sys.stderr.write(f"{Path(__file__).name}: {message}\n")
    raise SystemExit(1)


def compare(gradients, summed, rank):
    """Return the relative difference between the ring's sum and dist.all_reduce's; fail if it is too large."""
    reduced_by_torch, sum_of_rank_0 = gradients.clone(), summed.clone()
    dist.all_reduce(reduced_by_torch)
    difference = ((summed - reduced_by_torch).abs().max() / reduced_by_torch.abs().max()).item()
    if not difference <= ROUNDING[summed.dtype]:
        fail(f"the ring's sum on rank {rank} differs from dist.all_reduce's by {difference:.1e}: too much for rounding")
    dist.broadcast(sum_of_rank_0, 0)
    if not torch.equal(sum_of_rank_0, summed):
        fail(f"the ring's sum on rank {rank} differs from the one on rank 0")
    return difference


def train(rank, world_size, data, dtype, epochs):
    """Return the model, the loss of each update, and the largest difference from dist.all_reduce."""
    model = build().to(dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = data.tensors
    losses, largest = [], 0.0
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in order.split(BATCH):  # the last one is smaller
            local_batch = batch[rank::world_size]
            loss = F.cross_entropy(model(images[local_batch]), labels[local_batch], reduction="sum") / len(batch)
            optimizer.zero_grad()
            loss.backward()
            # One vector contains all gradients and the loss, so that each chunk is one message, not one for each layer.
            flat = torch.cat([*(parameter.grad.flatten() for parameter in parameters), loss.detach()[None]])
            if world_size > 1:
                before = flat.clone()
                ring_all_reduce(flat, rank, world_size)
                largest = max(largest, compare(before, flat, rank))
            for parameter, summed in zip(parameters, flat.split([p.numel() for p in parameters] + [1]), strict=False):
                parameter.grad.copy_(summed.view_as(parameter))
            optimizer.step()
            losses.append(flat[-1].item())
    return model, losses, largest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        # gloo on CPU. With NCCL, use one dist.batch_isend_irecv for a send and a receive.
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    train_data, eval_data = load(dtype)
    model, losses, largest = train(rank, world_size, train_data, dtype, EPOCHS)
    if rank == 0:
        for epoch, epoch_losses in enumerate(torch.tensor(losses, dtype=torch.float64).view(EPOCHS, -1)):
            print_losses(epoch, epoch_losses, every_update=args.float64)
        with torch.no_grad():
            images, labels = eval_data.tensors
            print(f"top1 {(model(images).argmax(1) == labels).double().mean().item():.4f}")
    if world_size > 1:
        if rank == 0:
            _, single_losses, _ = train(0, 1, train_data, dtype, epochs=1)  # rounding grows over more updates
            drift = max(abs(loss - single) / single for loss, single in zip(losses, single_losses, strict=False))
            if not drift <= 100 * ROUNDING[dtype]:
                fail(f"losses differ by up to {drift:.1e} from those of one process: too much for rounding")
            steps = 2 * (world_size - 1)
            print(
                f"ring: {steps} steps an update; a rank sends {steps / world_size:.2f} times the size of the gradients"
            )
            print(f"difference from dist.all_reduce: {largest:.1e}; the same bits on every rank")
            print(f"difference from one process, in the losses of the first epoch: {drift:.1e}")
        time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
