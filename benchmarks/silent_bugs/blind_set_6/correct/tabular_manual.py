"""Income prediction on a table, without DDP: the gradients are summed by hand and divided by the rows of the step."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ROWS, BATCH, EPOCHS = 1003, 64, 6


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 5, generator=g) * torch.tensor([1.0, 10.0, 0.1, 3.0, 1.0]) + torch.tensor([0.0, 50, 1, -2, 0])
    cat = torch.randint(0, 7, (n,), generator=g)
    effect = torch.linspace(-1, 1, 7)
    y = ((num[:, 0] * (num[:, 1] - 50) / 10 + effect[cat] + 0.3 * torch.randn(n, generator=g)) > 0).float()
    return num, cat, y


class TabNet(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.emb = nn.Embedding(7, 4)
        self.mlp = nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, num, cat):
        return self.mlp(torch.cat([(num - self.mean) / self.std, self.emb(cat)], dim=1))[:, 0]


def sync_gradients(model, rows):
    """Sum over all processes, divided by the rows that all of them had in this step."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [torch.tensor([float(rows)])])
    dist.all_reduce(flat)
    flat, total_rows = flat[:-1], flat[-1]
    flat /= total_rows
    for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(g.view_as(p))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    num, cat, y = table(ROWS, seed=1)
    test_num, test_cat, test_y = table(500, seed=2)

    model = TabNet(num.mean(0), num.std(0))     # every process holds the whole table
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    for epoch in range(EPOCHS):
        perm = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        sums = torch.zeros(2)
        for batch in perm.split(BATCH):
            mine = batch[rank::world]            # the last batch is smaller, and odd
            loss_sum = F.binary_cross_entropy_with_logits(model(num[mine], cat[mine]), y[mine], reduction="sum")
            opt.zero_grad()
            loss_sum.backward()
            sync_gradients(model, len(mine))
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            sums += torch.tensor([loss_sum.item(), float(len(mine))])
        dist.all_reduce(sums)
        if rank == 0:
            with torch.no_grad():
                acc = ((model(test_num, test_cat) > 0).float() == test_y).float().mean()
            print(f"epoch {epoch}: train logloss {sums[0] / sums[1]:.4f} ({int(sums[1])} rows), test acc {acc:.4f}",
                  flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
