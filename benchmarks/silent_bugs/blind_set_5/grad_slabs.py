import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, LENGTH = 48, 32, 16
MICRO_BATCHES, UPDATES = 4, 25


class Stage:
    """A part of the model whose gradients are reduced through one flat buffer."""

    def __init__(self, module):
        self.module = module
        self.params = list(module.parameters())
        for p in self.params:
            dist.broadcast(p.data, 0)
        self.kept = torch.zeros(sum(p.numel() for p in self.params))

    def flush(self, first):
        buffer = torch.cat([p.grad.flatten() for p in self.params])
        dist.all_reduce(buffer)
        if first:
            self.kept.copy_(buffer)
        else:
            self.kept.add_(buffer)
        for p in self.params:
            p.grad = None

    def fill(self, scale):
        for p, part in zip(self.params, self.kept.mul(scale).split([p.numel() for p in self.params])):
            p.grad = part.view_as(p)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.rnn(self.norm(x))[0]


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
stages = [Stage(nn.Embedding(VOCAB, WIDTH)), Stage(Mixer()), Stage(Mixer()), Stage(nn.Linear(WIDTH, VOCAB))]
optimizer = torch.optim.SGD([p for s in stages for p in s.params], lr=0.5, momentum=0.9)
g = torch.Generator().manual_seed(500 + rank)

for update in range(UPDATES):
    total = 0.0
    for micro in range(MICRO_BATCHES):
        start = torch.randint(0, VOCAB, (4, 1), generator=g)
        stride = torch.randint(1, 4, (4, 1), generator=g)
        ids = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
        h = ids[:, :-1]
        for stage in stages:
            h = stage.module(h)
        loss = F.cross_entropy(h.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for stage in stages:
            stage.flush(first=micro == 0)
        total += loss.item() / MICRO_BATCHES
    for stage in stages:
        stage.fill(1 / (world * MICRO_BATCHES))
    optimizer.step()
    for stage in stages:
        for p in stage.params:
            p.grad = None
    if rank == 0 and update % 6 == 0:
        print(f"update {update} loss {total:.4f}")

dist.destroy_process_group()
