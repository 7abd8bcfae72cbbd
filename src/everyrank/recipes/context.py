"""Context parallelism (ring attention): sequences are split over ranks, and keys and values are sent around a ring.

Run: torchrun --standalone --nproc-per-node 2 context.py

`python context.py` trains the same network in one process, on whole sequences. With --float64 both print the same
losses. Names are those of Liu et al., Ring Attention (2023), and of Dao, FlashAttention-2 (2023), for lse and dq.

Memory         the whole model on every rank, and the activations of a part of each sequence
Communication  in each attention, k and v around the ring in forward, and k, v, dk and dv in backward; in each update,
               the gradients by all-reduce
Use when       the activations of one long sequence do not fit on a device

What to change for your own training:
- Use RingAttention where your network calls scaled_dot_product_attention with is_causal=True. Other operations over
  several tokens (a convolution, a mean over the sequence) need communication, too.
- Pass positions to the network. If each rank counts its tokens from 0, the result is wrong, without an error.
- Shift the targets before the split. After it, the target of a rank's last token is on a different rank.
- All ranks read the same sequences. LENGTH has to be a multiple of twice the number of ranks.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

UPDATES = 40
BATCH, LENGTH = 8, 96  # sequences per update; bytes per sequence
SEED = 0
WIDTH, HEADS, BLOCKS = 48, 4, 2


def load(eval_data):
    """Return (input, target) bytes, both (LENGTH,), from the text of Python's help(); the last tenth for evaluation."""
    text = torch.tensor(list("\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()))
    text = text[len(text) * 9 // 10 :] if eval_data else text[: len(text) * 9 // 10]
    text = text[: (len(text) - 1) // LENGTH * LENGTH + 1]
    return TensorDataset(text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH))


def local_positions(rank, world_size):
    """Return the positions of a rank: one chunk from the front of the sequence and the matching one from the back."""
    # Late tokens attend to more tokens than early ones. With one contiguous chunk, the last rank would have most work.
    chunks = torch.arange(LENGTH).chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]])


def visible(step, length):
    """Return the slice of local q that attend to the k received after `step` steps, and the slice of these k."""
    source = (dist.get_rank() - step) % dist.get_world_size()
    if source < dist.get_rank():  # its front chunk is before the local chunks, its back chunk is after them
        return slice(length), slice(length // 2)
    if source > dist.get_rank():  # its chunks are between the two local chunks
        return slice(length // 2, length), slice(length)
    return slice(length), slice(length)  # local tokens: each attends to itself and earlier ones


def attention_scores(q, k, step):
    """Return q (N, H, Tq, D) times k (N, H, Tk, D), scaled: (N, H, Tq, Tk); in step 0, with the causal mask."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores if step else scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def ring_send_recv(tensor):
    """Start to send to the next rank. Return a function that waits for the previous rank's tensor and returns it."""
    rank, world_size, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    requests = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, (rank - 1) % world_size)])
    return lambda: [request.wait() for request in requests] and received


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's q to the k and v of all ranks.

    Shapes: N sequences, H heads, T tokens of this rank, D features of a head; q, k, v and the output (N, H, T, D).
    """

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.zeros_like(q)  # (N, H, T, D)
        lse = q.new_full((*q.shape[:-1], 1), -torch.inf)  # (N, H, T, 1): log of the sum of exp(scores) so far
        kv = torch.stack([k, v])  # (2, N, H, T, D)
        for step in range(dist.get_world_size()):
            is_last = step + 1 == dist.get_world_size()
            received = None if is_last else ring_send_recv(kv)  # the transfer runs while this rank computes
            rows, columns = visible(step, q.shape[-2])
            k_j, v_j = kv[..., columns, :]
            scores = attention_scores(q[..., rows, :], k_j, step)  # (N, H, Tq, Tk)
            # out was divided by exp(old_lse): rescale it to the new lse.
            old_lse = lse[..., rows, :]
            new_lse = torch.logaddexp(old_lse, scores.logsumexp(-1, keepdim=True))
            out[..., rows, :] = out[..., rows, :] * (old_lse - new_lse).exp() + (scores - new_lse).exp() @ v_j
            lse[..., rows, :] = new_lse
            kv = kv if is_last else received()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q)  # (N, H, T, D)
        delta = (dout * out).sum(-1, keepdim=True)  # (N, H, T, 1): D in FlashAttention-2
        # k and v go around the ring again, with dk and dv; each rank adds its part to dk and dv.
        kv_dkv = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])  # (4, N, H, T, D)
        for step in range(dist.get_world_size()):
            rows, columns = visible(step, q.shape[-2])
            k_j, v_j, dk_j, dv_j = kv_dkv[..., columns, :]  # views: += below changes kv_dkv
            q_i, dout_i = q[..., rows, :], dout[..., rows, :]
            p = (attention_scores(q_i, k_j, step) - lse[..., rows, :]).exp()  # (N, H, Tq, Tk): the softmax, recomputed
            dp = dout_i @ v_j.transpose(-1, -2)  # the same shape as p and ds
            ds = p * (dp - delta[..., rows, :]) / q.shape[-1] ** 0.5
            dq[..., rows, :] += ds @ k_j
            dk_j += ds.transpose(-1, -2) @ q_i
            dv_j += p.transpose(-1, -2) @ dout_i
            kv_dkv = ring_send_recv(kv_dkv)()  # also after the last step, which returns dk and dv to their rank
        return dq, kv_dkv[2], kv_dkv[3]


class Block(nn.Module):
    """Attention and a feed-forward network: (N, T, WIDTH) -> (N, T, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, stream):
        normed = self.attention_norm(stream)
        projections = self.query(normed), self.key(normed), self.value(normed)
        q, k, v = (tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2) for tensor in projections)  # (N, H, T, D)
        if dist.is_initialized():
            out = RingAttention.apply(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.output(out.transpose(1, 2).flatten(-2))
        return stream + self.feed(self.feed_norm(stream))


class Decoder(nn.Module):
    """Logits of the next byte: bytes (N, T) and their positions in the sequence (T,) -> (N, T, 256)."""

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
    """Return the fraction of correctly predicted bytes in 40 sequences of the evaluation data."""
    inputs, targets = (tensor.to(device)[:, positions] for tensor in load(eval_data=True)[:40])
    correct = (model(inputs, positions).argmax(-1) == targets).sum()
    if dist.is_initialized():
        dist.all_reduce(correct)
    return correct.item() / (40 * LENGTH)


def print_losses(losses, every_update):
    """Print every tenth loss, or with --float64 every loss."""
    for index, loss in enumerate(losses.tolist()):
        if every_update:
            print(f"update {index} loss {loss}")
        elif index % 10 == 9:
            print(f"update {index + 1} loss {loss:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--float64", action="store_true", help="train in float64, and print the loss of every update")
    args = parser.parse_args()
    dtype = torch.float64 if args.float64 else torch.float32
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if LENGTH % (2 * world_size):
        if rank == 0:
            sys.stderr.write(
                f"{Path(__file__).name}: LENGTH={LENGTH} is not a multiple of twice the {world_size} ranks\n"
            )
        raise SystemExit(2)
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # one GPU per rank
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        # torchrun passes address and ranks in the environment. The timeout ends the wait for a rank that died.
        backend, device_id = ("nccl", device) if cuda else ("gloo", None)
        dist.init_process_group(backend, timeout=timedelta(minutes=5), device_id=device_id)
    positions = local_positions(rank, world_size).to(device)
    # All ranks draw the same sequences from one seed, and each takes its own positions of them.
    train_data, generator = load(eval_data=False), torch.Generator().manual_seed(SEED)
    sampler = RandomSampler(train_data, generator=generator)
    loader = DataLoader(train_data, BATCH, sampler=sampler, pin_memory=cuda)
    model = Decoder().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = torch.zeros(UPDATES, dtype=torch.float64, device=device)
    for index, (inputs, targets) in enumerate(islice(loader, UPDATES)):
        num_terms = targets.numel()  # terms of the loss on all ranks
        inputs, targets = (tensor.to(device, non_blocking=True)[:, positions] for tensor in (inputs, targets))
        logits = model(inputs, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_terms
        optimizer.zero_grad()
        loss.backward()
        if world_size > 1:  # each rank has the gradients of its own tokens
            gradients = [parameter.grad for parameter in model.parameters()]
            flat = parameters_to_vector(gradients)
            dist.all_reduce(flat)
            vector_to_parameters(flat, gradients)
        optimizer.step()
        losses[index] = loss.detach()

    if world_size > 1:
        dist.all_reduce(losses)
    if rank == 0:
        print_losses(losses, args.float64)
    top1 = evaluate(model, positions, device)
    if rank == 0:
        print(f"top1 {top1:.4f}")
    if world_size > 1:
        time.sleep(0.1)  # gloo's threads may still hold a tensor of the last all-reduce
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
