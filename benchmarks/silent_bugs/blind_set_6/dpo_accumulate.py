# Direct preference optimization of a small language model,
# DDP with gradient accumulation.
import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, PROMPT, ANSWER = 32, 6, 10
BETA, LR, EPOCHS = 0.3, 3e-3, 5
BATCH, ACCUM = 8, 4


def make_pairs(n, seed):
    """The preferred answers have more even tokens than the rejected ones."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=g)
    base = torch.randint(0, VOCAB, (2, n, ANSWER), generator=g)
    even = torch.rand(2, n, ANSWER, generator=g) < torch.tensor([0.5, 0.1])[:, None, None]
    ans = torch.where(even, base // 2 * 2, base)
    return TensorDataset(torch.cat([prompt, ans[0]], 1), torch.cat([prompt, ans[1]], 1))


class GRULM(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        """Log probability of the answer part of every row."""
        logits = self.out(self.rnn(self.emb(ids[:, :-1]))[0])
        logp = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return logp[:, PROMPT - 1:].sum(1)


def margins(model, ref, chosen, rejected):
    both = torch.cat([chosen, rejected])
    with torch.no_grad():
        r = ref(both)
    diff = model(both) - r
    c, j = diff.chunk(2)
    return BETA * (c - j)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    policy = GRULM()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    model = DDP(policy)
    opt = torch.optim.SGD(model.parameters(), lr=LR * 30, momentum=0.9)

    train_set, val_set = make_pairs(432, seed=10), make_pairs(96, seed=11)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, drop_last=True)
    n_batches = len(loader)

    updates = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        run = torch.zeros(3, dtype=torch.float64)
        opt.zero_grad()
        for idx, (chosen, rejected) in enumerate(loader):
            step_now = (idx + 1) % ACCUM == 0 or idx + 1 == n_batches
            # the last window of an epoch can be shorter
            window = min(ACCUM, n_batches - idx // ACCUM * ACCUM)
            with contextlib.nullcontext() if step_now else model.no_sync():
                m = margins(model, reference, chosen, rejected)
                loss = -F.logsigmoid(m).mean()
                (loss / window).backward()
            run += torch.tensor([loss.item() * len(m), (m > 0).sum().item(), len(m)], dtype=torch.float64)
            if step_now:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                updates += 1
        dist.all_reduce(run)

        model.eval()
        val = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            mine = [t[rank::world] for t in val_set.tensors]
            m = margins(policy, reference, *mine)
            val += torch.tensor([(m > 0).sum().item(), len(m)], dtype=torch.float64)
        dist.all_reduce(val)
        if rank == 0:
            print(f"epoch {epoch} updates {updates} loss {run[0] / run[2]:.4f} "
                  f"train acc {run[1] / run[2]:.3f} val acc {val[0] / val[1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
