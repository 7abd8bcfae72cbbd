import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(backend="nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
rank = dist.get_rank()
world_size = dist.get_world_size()

batch_size = 16
epochs = 30


class AutoEncoder(nn.Module):
    def __init__(self, dim=40, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, code))
        self.decoder = nn.Sequential(nn.Linear(code, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def spectra(n, seed):
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    x = torch.tanh(torch.randn(n, 4, generator=g) @ mixing)
    return TensorDataset(x + 0.3 * torch.randn(n, 40, generator=g))


train_set = spectra(256, seed=1)
valid_set = spectra(128, seed=2)
train_sampler = DistributedSampler(train_set)
valid_part = Subset(valid_set, range(rank, len(valid_set), world_size))
train_loader = DataLoader(train_set, batch_size=batch_size, sampler=train_sampler, pin_memory=True)
valid_loader = DataLoader(valid_part, batch_size=batch_size, pin_memory=True)

torch.manual_seed(0)
model = AutoEncoder().cuda()
model = DDP(model, device_ids=[local_rank])
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1, threshold=1e-3)
mse = nn.MSELoss()


def validate():
    model.eval()
    loss_sum = torch.zeros(1).cuda()
    count = torch.zeros(1).cuda()
    with torch.no_grad():
        for (x,) in valid_loader:
            x = x.cuda(non_blocking=True)
            loss_sum += mse(model.module(x), x) * len(x)
            count += len(x)
    dist.all_reduce(loss_sum)
    dist.all_reduce(count)
    return (loss_sum / count).item()


for epoch in range(epochs):
    train_sampler.set_epoch(epoch)
    model.train()
    train_loss = torch.zeros(1).cuda()
    for (x,) in train_loader:
        x = x.cuda(non_blocking=True)
        loss = mse(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_loss += loss.detach()
    train_loss /= len(train_loader)
    dist.all_reduce(train_loss)

    valid_loss = validate()
    scheduler.step(valid_loss)

    if rank == 0:
        lr = optimizer.param_groups[0]["lr"]
        print(
            f"epoch {epoch:02d} train {train_loss.item() / world_size:.4f} "
            f"valid {valid_loss:.4f} lr {lr:.1e}",
            flush=True,
        )

if rank == 0:
    torch.save(model.module.state_dict(), "autoencoder.pt")
dist.barrier()
dist.destroy_process_group()
