import torch
import torch.distributed as dist
from torch import nn

MICRO, ROWS, LENGTH, VOCAB, WIDTH = 4, 4, 12, 40, 32
MAX_NORM = 0.25


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attend(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(x)


def build(rank):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Block())
    last = nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
    return first if rank == 0 else last


def step_first(stage, batches):
    """All forwards, then all backwards, with the other stage's gradients."""
    sent = []
    for ids in batches:
        h = stage(ids[:, :-1])
        dist.send(h.detach(), 1)
        sent.append(h)
    for h in sent:
        grad = torch.empty_like(h)
        dist.recv(grad, 1)
        h.backward(grad)
    return torch.zeros(())


def step_last(stage, batches):
    received, total = [], 0.0
    for _ in batches:
        h = torch.empty(ROWS, LENGTH, WIDTH)
        dist.recv(h, 0)
        received.append(h.requires_grad_())
    for ids, h in zip(batches, received):
        loss = nn.functional.cross_entropy(stage(h).flatten(0, 1), ids[:, 1:].flatten()) / MICRO
        loss.backward()
        dist.send(h.grad, 0)
        total += loss.detach()
    return total


def main(updates=30):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = build(rank)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9)
    g = torch.Generator().manual_seed(4)
    for update in range(updates):
        start = torch.randint(0, VOCAB, (MICRO, ROWS, 1), generator=g)
        batches = (start + torch.randint(1, 5, (MICRO, ROWS, 1), generator=g) * torch.arange(LENGTH + 1)) % VOCAB
        loss = step_first(stage, batches) if rank == 0 else step_last(stage, batches)
        squares = sum(p.grad.pow(2).sum() for p in stage.parameters())
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(stage.parameters(), MAX_NORM, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and update % 6 == 5:
            print(f"update {update + 1} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
