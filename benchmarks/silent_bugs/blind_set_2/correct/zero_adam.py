# ZeRO-1: every rank keeps the Adam state of its part of the parameters
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    x = torch.rand(256, 20, generator=g)
    y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 2)))
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4 * len(loader))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        s = torch.zeros(3)
        for xb, yb in loader:
            opt.zero_grad()
            out = model(xb)
            loss = nn.functional.cross_entropy(out, yb)
            loss.backward()
            opt.step()
            sched.step()
            s += torch.tensor([loss.item() * len(yb), (out.argmax(1) == yb).sum().item(), len(yb)])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch} loss {(s[0] / s[2]).item():.4f} train accuracy {(s[1] / s[2]).item():.3f}")
    opt.consolidate_state_dict(to=0)   # a collective: all ranks call it
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, "/tmp/blind2/correct/zero_adam.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
