"""Half precision gradients with a hand-written dynamic loss scale and plain all-reduce."""
import torch
import torch.distributed as dist
import torch.nn as nn


class LossScale:
    def __init__(self, start=2.0 ** 16, window=3):
        self.value, self.window, self.good = start, window, 0

    def update(self, ok):
        if ok:
            self.good += 1
            if self.good == self.window:
                self.value, self.good = self.value * 2, 0
        else:
            self.value, self.good = self.value / 2, 0


def table(n=512):
    g = torch.Generator().manual_seed(31)
    x = torch.randn(n, 6, generator=g)
    x[::37] *= 6  # a few wild rows
    y = torch.tanh(x[:, :1]) + 0.3 * x[:, 1:2]
    return x, y


def sync_gradients(params, world):
    """Round to half, note overflow, average over the ranks. Returns whether the step may be taken."""
    ok = torch.ones(())
    for p in params:
        half = p.grad.half()
        if not torch.isfinite(half).all():
            ok.zero_()
        p.grad.copy_(half.float().nan_to_num(0.0, 0.0, 0.0))
        dist.all_reduce(p.grad)
        p.grad.div_(world)
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    return bool(ok)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scale = LossScale()
    x, y = table()
    shuffler = torch.Generator().manual_seed(0)
    params = list(model.parameters())
    for epoch in range(4):
        total = torch.zeros(2)
        for idx in torch.randperm(len(x), generator=shuffler).split(64):
            mine = idx[rank::world]
            loss = (model(x[mine]) - y[mine]).pow(2).mean()
            opt.zero_grad(set_to_none=False)
            (loss * scale.value).backward()
            ok = sync_gradients(params, world)
            if ok:
                for p in params:
                    p.grad.div_(scale.value)
                opt.step()
            scale.update(ok)
            total += torch.tensor([loss.item() * len(mine), len(mine)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {(total[0] / total[1]).item():.5f} scale {scale.value:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
