"""Context parallelism: the sequence is cut over ranks, and keys and values go round in a ring (ring attention).

Run: torchrun --standalone --nproc-per-node 2 context.py

`python context.py` trains the same network on whole sequences, in one process: the losses are the same.

What to change for your own training:
- Put RingAttention where your network calls scaled_dot_product_attention with is_causal=True. What else looks at more
  than one token (a convolution, a mean over the sequence) would need the other ranks too.
- Positions are an input of the network: a rank that counts its own tokens from 0 is silently wrong.
- Targets are shifted before the cut. Afterwards the last token of a rank's part has its target on another rank.
- Every rank holds the whole model, and reads the same sequences; twice their number divides LENGTH.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

UPDATES = 40
BATCH, LENGTH = 8, 96  # sequences of one update, and bytes of each
SEED = 0
DTYPE = torch.float64  # so that the losses can be compared with any other way of running; float32 is faster
WIDTH, HEADS, BLOCKS = 48, 4, 2


def load(device, held_out):
    """Inputs and next bytes, (N, LENGTH) each, of the text behind Python's help(). The last tenth is held out."""
    text = torch.tensor(list("\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()), device=device)
    text = text[len(text) * 9 // 10 :] if held_out else text[: len(text) * 9 // 10]
    text = text[: (len(text) - 1) // LENGTH * LENGTH + 1]
    return text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH)


def places(rank, world_size):
    """The tokens of a rank: a piece from the front and its mirror image from the back."""
    # Late tokens look at more than early ones: with contiguous parts the last rank would have most of the work.
    pieces = torch.arange(LENGTH).chunk(2 * world_size)
    return torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]])


def visible(step, length):
    """Of the own tokens those that see some, and of those that have come here in so many steps those that are seen."""
    source = (dist.get_rank() - step) % dist.get_world_size()
    if source < dist.get_rank():  # its front piece is before both own ones, its back piece behind both
        return slice(length), slice(length // 2)
    if source > dist.get_rank():  # both are before the own back piece, and behind the own front piece
        return slice(length // 2, length), slice(length)
    return slice(length), slice(length)  # the own ones: each sees itself and those before it


def scaled(query, key, step):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores if step else scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def pass_on(tensor):
    """Starts sending to the next rank; returns what waits for, and gives, what the previous rank sends."""
    rank, world_size, arriving = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    messages = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size)])
    return lambda: [message.wait() for message in messages] and arriving


class RingAttention(torch.autograd.Function):
    """Causal attention of the own queries to all keys and values: each (N, heads, own tokens, width)."""

    @staticmethod
    def forward(ctx, query, key, value):
        output, total = torch.zeros_like(query), query.new_full((*query.shape[:-1], 1), -torch.inf)
        pair = torch.stack([key, value])
        for step in range(dist.get_world_size()):
            is_last = step + 1 == dist.get_world_size()
            arrived = None if is_last else pass_on(pair)  # while this rank works on what it has
            rows, columns = visible(step, query.shape[-2])
            own_query, own_output, own_total = (tensor[..., rows, :] for tensor in (query, output, total))
            scores = scaled(own_query, pair[0][..., columns, :], step)
            # total is the logarithm of the sum of exponentials so far; as it grows, what is there weighs less.
            grown = torch.logaddexp(own_total, scores.logsumexp(-1, keepdim=True))
            own_output.mul_((own_total - grown).exp()).add_((scores - grown).exp() @ pair[1][..., columns, :])
            own_total.copy_(grown)
            pair = pair if is_last else arrived()
        ctx.save_for_backward(query, key, value, output, total)
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, output, total = ctx.saved_tensors
        query_gradient, common = torch.zeros_like(query), (gradient * output).sum(-1, keepdim=True)
        # Keys and values go round once more, with their gradients, to which each rank adds its part.
        four = torch.stack([key, value, torch.zeros_like(key), torch.zeros_like(value)])
        for step in range(dist.get_world_size()):
            rows, columns = visible(step, query.shape[-2])
            key, value, key_gradient, value_gradient = four[..., columns, :]
            own_query, own_gradient = query[..., rows, :], gradient[..., rows, :]
            weights = (scaled(own_query, key, step) - total[..., rows, :]).exp()
            inner = weights * (own_gradient @ value.transpose(-1, -2) - common[..., rows, :]) / query.shape[-1] ** 0.5
            query_gradient[..., rows, :] += inner @ key
            key_gradient += inner.transpose(-1, -2) @ own_query
            value_gradient += weights.transpose(-1, -2) @ own_gradient
            four = pass_on(four)()  # after the last step too: that one takes them home
        return query_gradient, four[2], four[3]


class Block(nn.Module):
    """Attention, then two layers on each token: (N, T, WIDTH) -> (N, T, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, stream):
        normed = self.attention_norm(stream)
        heads = [
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        if dist.is_initialized():
            mixed = RingAttention.apply(*heads)
        else:
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        stream = stream + self.output(mixed.transpose(1, 2).flatten(-2))
        return stream + self.feed(self.feed_norm(stream))


class Decoder(nn.Module):
    """Scores of the next byte: bytes (N, T) and their places in the sequence (T,) -> (N, T, 256)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)  # the same weights in every process
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, inputs, positions):
        stream = self.bytes(inputs) + self.positions(positions)
        for block in self.blocks:
            stream = block(stream)
        return self.head(stream)


@torch.no_grad()
def evaluate(model, positions, device):
    """The fraction of held-out bytes that are guessed right; of 40 sequences, to be quick."""
    inputs, targets = (tensor[:40, positions] for tensor in load(device, held_out=True))
    right = (model(inputs, positions).argmax(-1) == targets).sum()
    if dist.is_initialized():
        dist.all_reduce(right)
    return right.item() / (40 * LENGTH)


def main():
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if LENGTH % (2 * world_size):
        if rank == 0:
            sys.stderr.write(f"{Path(__file__).name}: LENGTH={LENGTH}: twice {world_size} ranks must divide it\n")
        raise SystemExit(2)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if world_size > 1:
        if cuda:
            torch.cuda.set_device(device)
        # Address and ranks come from torchrun. The timeout ends a wait for a rank that died.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    inputs, targets = load(device, held_out=False)
    positions = places(rank, world_size).to(device)
    model = Decoder().to(device, DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(SEED))  # the same on all ranks
    batches = order.to(device).split(BATCH)[:UPDATES]
    sums = torch.zeros(len(batches), dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        scores = model(inputs[batch][:, positions], positions)
        loss = F.cross_entropy(scores.flatten(0, 1), targets[batch][:, positions].flatten(), reduction="sum")
        optimizer.zero_grad()
        (loss / (len(batch) * LENGTH)).backward()  # by the number of bytes on all ranks
        if world_size > 1:  # each rank has the part of its own tokens
            gradients = [parameter.grad for parameter in model.parameters()]
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat, gradients)
        optimizer.step()
        sums[index] = loss.detach()

    if world_size > 1:
        dist.all_reduce(sums)
    if rank == 0:
        for index, total in enumerate(sums.tolist()):
            print(f"update {index} loss {total / (len(batches[index]) * LENGTH)}")
    top1 = evaluate(model, positions, device)
    if rank == 0:
        print(f"top1 {top1}")
    if world_size > 1:
        time.sleep(0.1)  # for gloo's threads: exiting while one still holds the last tensor aborts the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
