"""All-reduce by hand: gradients go around a ring of ranks in plain sends and receives, and a small training uses them.

Run: torchrun --standalone --nproc-per-node 2 ring_allreduce.py

`python ring_allreduce.py` trains the same in one process, without a ring.

Holds     the whole model, its gradients and the optimizer state, on every rank, as in DDP
Travels   the gradients in N parts, to the next rank in 2 (N - 1) steps: on N ranks each sends 2 (N - 1) / N of them
Use when  you want to see what is inside DistributedDataParallel and dist.all_reduce; to train, those are faster

What to change for your own training:
- Replace load() and build() of digits.py. BATCH is the batch of all ranks; any number of ranks works.
- Each rank divides its loss by the size of the whole batch, so that the sum over ranks is the mean over the batch. An
  average of the ranks' own means is another number as soon as one of them has fewer samples.
- All gradients travel in one piece after backward. DDP sends them in buckets, while backward still computes the others.
- A step waits for a neighbour: small tensors cost 2 (N - 1) latencies. For those a tree of ranks is faster.
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
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}  # of sums in another order: a few units in the last place


def ring_all_reduce(tensor, rank, world_size):
    """Replace `tensor`, of shape (length,), by its sum over all ranks. Three ranks, parts a b c:

              rank 0          rank 1          rank 2
    start     a0  b0  c0      a1  b1  c1      a2  b2  c2
    step 1    a0 ->           b1 ->           c2 ->            each to the next rank, which adds it to its own
              a0  b0  c02     a01 b1  c1      a2  b12 c2
    step 2    c02 ->          a01 ->          b12 ->
              a0  B   c02     a01 b1  C       A   b12 c2       each rank has one part of the sum
    step 3    B ->            C ->            A ->             these go around once more, and are copied
    step 4    A ->            B ->            C ->
    end       A   B   C       A   B   C       A   B   C
    """
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    parts = tensor.tensor_split(world_size)  # views: what is written into a part stands in the tensor

    def pass_on(outgoing, incoming):
        # Not send, which waits for the other's recv: all would send, and none come to receive.
        sending = dist.isend(outgoing, to)
        dist.recv(incoming, source)
        sending.wait()

    for step in range(world_size - 1):  # reduce-scatter
        own = parts[(rank - step - 1) % world_size]
        received = torch.empty_like(own)
        pass_on(parts[(rank - step) % world_size], received)
        own += received
    for step in range(world_size - 1):  # all-gather
        pass_on(parts[(rank + 1 - step) % world_size], parts[(rank - step) % world_size])


def fail(why):
    sys.stderr.write(f"{Path(__file__).name}: {why}\n")
    raise SystemExit(1)


def compare(gradients, summed, rank):
    """How far the ring's sum is from dist.all_reduce's, as a part of the largest gradient; ends if too far."""
    reduced_by_torch, of_rank_0 = gradients.clone(), summed.clone()
    dist.all_reduce(reduced_by_torch)
    difference = ((summed - reduced_by_torch).abs().max() / reduced_by_torch.abs().max()).item()
    if not difference <= ROUNDING[summed.dtype]:
        fail(f"the ring's sum on rank {rank} differs from dist.all_reduce's by {difference:.1e}: that is not rounding")
    dist.broadcast(of_rank_0, 0)
    if not torch.equal(of_rank_0, summed):
        fail(f"the ring's sum on rank {rank} is not that on rank 0")
    return difference


def train(rank, world_size, data, dtype, epochs):
    """(the model, the loss of each update, the largest difference from dist.all_reduce)."""
    model = build().to(dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = data.tensors
    losses, largest = [], 0.0
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in order.split(BATCH):  # the last one is smaller
            own = batch[rank::world_size]
            loss = F.cross_entropy(model(images[own]), labels[own], reduction="sum") / len(batch)
            optimizer.zero_grad()
            loss.backward()
            # All gradients and the loss as one vector: one message for each part, instead of one for each layer's.
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
    parser.add_argument("--float64", action="store_true", help="print every loss, to compare with another script")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        # Over gloo, on CPUs. On NCCL a send and a receive both ways have to be one call of dist.batch_isend_irecv.
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
            _, alone, _ = train(0, 1, train_data, dtype, epochs=1)  # over more updates training magnifies rounding
            drift = max(abs(ours - loss) / loss for ours, loss in zip(losses, alone, strict=False))
            if not drift <= 100 * ROUNDING[dtype]:
                fail(f"losses differ by up to {drift:.1e} from those of one process: that is not rounding")
            steps = 2 * (world_size - 1)
            print(
                f"the ring: {steps} steps an update, in which a rank sends {steps / world_size:.2f} times its gradients"
            )
            print(f"against dist.all_reduce: equal to {largest:.1e}, and the same bits on every rank")
            print(f"against one process: the losses of the first epoch equal to {drift:.1e}")
        time.sleep(0.1)  # for gloo's threads: see the end of ddp_torchrun.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
