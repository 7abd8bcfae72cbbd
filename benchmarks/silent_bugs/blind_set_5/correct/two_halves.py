import torch
import torch.distributed as dist
from torch import nn

VOCAB, WIDTH, MICRO, ROWS, LENGTH = 32, 24, 3, 4, 10


class Half(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first
        self.table = nn.Parameter(0.2 * torch.randn(VOCAB, WIDTH))
        self.rnn, self.norm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x):
        if self.first:
            x = nn.functional.embedding(x, self.table)
        x = x + self.rnn(self.norm(x))[0]
        return x if self.first else x @ self.table.t()


def one_update(half, ids):
    """Gradients of the mean loss over all micro-batches; the loss is known on the last stage."""
    total, sent, works = torch.zeros(()), [], []
    for part in ids:
        if half.first:
            h = half(part[:, :-1])
            works.append(dist.isend(h.detach(), dst=1))
            sent.append(h)
        else:
            h = torch.empty(ROWS, LENGTH, WIDTH)
            dist.recv(h, src=0)
            h.requires_grad_()
            loss = nn.functional.cross_entropy(half(h).flatten(0, 1), part[:, 1:].flatten()) / len(ids)
            loss.backward()
            dist.send(h.grad, dst=0)
            total += loss.detach()
    for h in sent:
        grad = torch.empty_like(h)
        dist.recv(grad, src=1)
        h.backward(grad)
    for work in works:
        work.wait()
    return total


def finish(half, optimizer, max_norm):
    dist.all_reduce(half.table.grad)
    square = torch.zeros(())
    for name, p in half.named_parameters():
        if name != "table" or half.first:
            square += p.grad.square().sum()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(half.parameters(), max_norm, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    half = Half(first=rank == 0)
    dist.broadcast(half.table.data, 0)
    optimizer = torch.optim.AdamW(half.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(77)
    for update in range(30):
        start = torch.randint(0, VOCAB, (MICRO, ROWS, 1), generator=g)
        ids = (start + 3 * torch.arange(LENGTH + 1)) % VOCAB
        loss = one_update(half, ids)
        finish(half, optimizer, 1.0)
        if rank == 1 and update % 10 == 9:
            print(f"update {update + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
