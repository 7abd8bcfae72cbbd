# Small recurrent LM. Works with plain python, too:
#   python lm_nosync.py
#   torchrun --standalone --nproc-per-node 2 lm_nosync.py
import contextlib
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

distributed = "RANK" in os.environ
if distributed:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
say = print if rank == 0 else (lambda *a, **k: None)

seq_len = 24
micro_batch = 4
global_batch = 32  # sequences per optimizer step, over all ranks
grad_accum = global_batch // (micro_batch * world)
assert grad_accum * micro_batch * world == global_batch
epochs, base_lr, warmup = 3, 8e-3, 6

corpus = ("to be or not to be that is the question whether tis nobler in the mind " * 90).encode()
tokens = torch.tensor(list(corpus)) - 32
vocab = int(tokens.max()) + 1
n_seq = (len(tokens) - 1) // seq_len


def sequence(i):
    piece = tokens[i * seq_len : (i + 1) * seq_len + 1]
    return piece[:-1], piece[1:]


def epoch_steps(epoch):
    """List of steps; each step is the list of this rank's micro batches."""
    order = torch.randperm(n_seq, generator=torch.Generator().manual_seed(4000 + epoch))
    for s in range(n_seq // global_batch):
        step = order[s * global_batch : (s + 1) * global_batch]
        yield step.view(grad_accum, world, micro_batch)[:, rank]


class CharRNN(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def lr_at(step, total):
    if step < warmup:
        return base_lr * (step + 1) / warmup
    return base_lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


torch.manual_seed(0)
net = CharRNN()
model = nn.parallel.DistributedDataParallel(net) if distributed else net
optimizer = torch.optim.Adam(model.parameters(), lr=base_lr)
total_steps = epochs * (n_seq // global_batch)
step = 0

for epoch in range(epochs):
    seen, nll = 0, torch.zeros((), dtype=torch.float64)
    for micro_batches in epoch_steps(epoch):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, total_steps)
        optimizer.zero_grad(set_to_none=True)
        for k, ids in enumerate(micro_batches):
            last = k == grad_accum - 1
            x, y = map(torch.stack, zip(*(sequence(i) for i in ids.tolist())))
            quiet = model.no_sync() if distributed and not last else contextlib.nullcontext()
            with quiet:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                (loss / grad_accum).backward()
            nll += loss.detach().double()
            seen += 1
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        step += 1
    mean = nll / seen
    if distributed:
        torch.distributed.all_reduce(mean)
        mean /= world
    say(f"epoch {epoch} step {step} nll {mean.item():.5f}")

if distributed:
    torch.distributed.destroy_process_group()
