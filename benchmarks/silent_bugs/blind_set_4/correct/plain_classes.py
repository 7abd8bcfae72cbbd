import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# each rank starts from its own seed; DDP sends rank 0's weights to everybody
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234 + rank)
g = torch.Generator().manual_seed(0)
x = torch.randn(100, 8, generator=g)
y = (x[:, 0] * x[:, 1] > 0).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=10, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model = DDP(model)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for bx, by in loader:
        loss = nn.functional.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print("epoch", epoch, "loss", round(mean.item() / world, 4))
dist.destroy_process_group()
