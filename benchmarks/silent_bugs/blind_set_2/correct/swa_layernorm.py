"""Stochastic weight averaging with DDP (layer norm, so there are no statistics to re-estimate)."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

g = torch.Generator().manual_seed(77)
x = torch.randn(500, 9, generator=g)
y = torch.sin(x[:, :1] * 2) + x[:, 1:2] * x[:, 2:3]
train = TensorDataset(x[:400], y[:400])
vx, vy = x[400:][rank::world], y[400:][rank::world]

sampler = DistributedSampler(train, drop_last=True)
loader = DataLoader(train, batch_size=20, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(9, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 1)))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
averaged = AveragedModel(model.module)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)
swa_lr = SWALR(opt, swa_lr=0.02, anneal_epochs=1)


@torch.no_grad()
def mse(m):
    m.eval()
    s = torch.tensor([(m(vx) - vy).pow(2).sum(), len(vx)])
    dist.all_reduce(s)
    m.train()
    return (s[0] / s[1]).item()


for epoch in range(6):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        opt.step()
    if epoch >= 3:
        averaged.update_parameters(model.module)
        swa_lr.step()
    else:
        cosine.step()
    plain = mse(model.module)
    if rank == 0:
        print(f"epoch {epoch} validation mse {plain:.4f}")

final = mse(averaged)
if rank == 0:
    print(f"averaged weights: {final:.4f}")
    torch.save(averaged.module.state_dict(), "/tmp/blind2/correct/swa.pt")
dist.barrier()
dist.destroy_process_group()
