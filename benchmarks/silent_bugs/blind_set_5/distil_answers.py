import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Reader(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def jensen_shannon(student, teacher, beta=0.5):
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    m = torch.logsumexp(torch.stack([s + torch.tensor(1 - beta).log(), t + torch.tensor(beta).log()]), 0)
    kl = lambda p: F.kl_div(m, p, reduction="none", log_target=True).sum(-1)
    return beta * kl(t) + (1 - beta) * kl(s)


def conversations(args, g):
    """Endless micro-batches of token ids and the mask of the response tokens."""
    while True:
        ids = torch.randint(0, args.vocab, (args.micro_batch, args.length), generator=g)
        answer = torch.randint(1, args.length, (args.micro_batch, 1), generator=g)
        answer = torch.minimum(answer, torch.randint(1, args.length, (1, 1), generator=g))
        yield ids, (torch.arange(args.length) >= args.length - answer).float()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=32)
    p.add_argument("--length", type=int, default=24)
    p.add_argument("--micro-batch", type=int, default=2)
    p.add_argument("--accumulation", type=int, default=4)
    p.add_argument("--updates", type=int, default=20)
    p.add_argument("--lr", type=float, default=0.5)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    teacher = Reader(args.vocab, 48).eval().requires_grad_(False)
    for p in teacher.parameters():
        p.mul_(3)
    student = DDP(Reader(args.vocab, 24))
    optimizer = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9)
    stream = conversations(args, torch.Generator().manual_seed(rank))
    for update in range(args.updates):
        window = [next(stream) for _ in range(args.accumulation)]
        tokens = sum(mask.sum() for _, mask in window)
        dist.all_reduce(tokens)
        for i, (ids, mask) in enumerate(window):
            student.require_backward_grad_sync = i == args.accumulation - 1
            divergence = jensen_shannon(student(ids), teacher(ids)) * mask
            loss = divergence.sum() * world / tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and update % 5 == 4:
            print(f"update {update + 1}: {divergence.sum().item() / mask.sum().item():.5f} per token, world {world}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
