"""Language model with a mixture of experts layer; the experts are spread over the ranks.

Every rank has its own part of the batch (data parallel) and its own experts
(expert parallel); tokens travel by all-to-all.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CTX, DIM, EXPERTS = 32, 24, 32, 4
GLOBAL_BATCH, STEPS, LR, AUX = 16, 120, 0.5, 0.01


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.send, ctx.recv = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(sum(ctx.send), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), ctx.send, ctx.recv)
        return out, None, None


class MoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.world, self.n_local = world, EXPERTS // world
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        # all ranks draw the same numbers, then keep their own experts
        experts = [nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
                   for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(experts[rank * self.n_local:(rank + 1) * self.n_local])

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        count = torch.bincount(choice, minlength=EXPERTS)

        # balance loss with the routing fractions of the whole batch
        total = count.float()
        dist.all_reduce(total)
        aux = EXPERTS * (total / total.sum() * probs.mean(0)).sum()

        order = choice.argsort(stable=True)
        all_counts = [torch.empty_like(count) for _ in range(self.world)]
        dist.all_gather(all_counts, count)
        me = dist.get_rank() * self.n_local
        send = count.view(self.world, -1).sum(1).tolist()
        table = torch.stack(all_counts)[:, me:me + self.n_local]  # source rank x local expert
        recv = table.sum(1).tolist()
        tokens = AllToAll.apply(x[order], send, recv)
        pieces = tokens.split(table.flatten().tolist())
        out = [self.experts[i % self.n_local](p) for i, p in enumerate(pieces)]
        back = AllToAll.apply(torch.cat(out), recv, send)
        y = torch.zeros_like(x).index_copy(0, order, back)
        return y * gate[:, None], aux, total


class LM(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.norm, self.moe, self.out = nn.LayerNorm(DIM), MoE(rank, world), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        h = self.rnn(self.emb(ids))[0]
        flat = self.norm(h).flatten(0, 1)
        y, aux, load = self.moe(flat)
        return self.out(h.flatten(0, 1) + y), aux, load


def make_corpus(n=512):
    g = torch.Generator().manual_seed(3)
    step = torch.randint(1, 6, (n, 1), generator=g)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    ids = (start + step * torch.arange(CTX + 1)) % VOCAB
    noise = torch.rand(ids.shape, generator=g) < 0.05
    return torch.where(noise, torch.randint(0, VOCAB, ids.shape, generator=g), ids)


def sync_gradients(model, world):
    for name, p in model.named_parameters():
        if "moe.experts" in name:
            # tokens of all ranks are already in this gradient, each loss is a mean over one rank
            p.grad /= world
        else:
            dist.all_reduce(p.grad)
            p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LM(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    data = make_corpus()
    order_rng = torch.Generator().manual_seed(8)
    for step in range(1, STEPS + 1):
        batch = data[torch.randint(0, len(data), (GLOBAL_BATCH,), generator=order_rng)][rank::world]
        logits, aux, load = model(batch[:, :-1])
        ce = F.cross_entropy(logits, batch[:, 1:].flatten())
        opt.zero_grad()
        (ce + AUX * aux).backward()
        sync_gradients(model, world)
        opt.step()
        if step % 10 == 0:
            stat = torch.stack([ce.detach(), aux.detach()])
            dist.all_reduce(stat)
            stat /= world
            if rank == 0:
                share = " ".join(f"{v:.2f}" for v in (load / load.sum()).tolist())
                print(f"step {step} ce {stat[0]:.4f} aux {stat[1]:.4f} load {share}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
