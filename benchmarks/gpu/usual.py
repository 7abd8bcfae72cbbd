"""A DDP script with mistakes: no set_epoch, and an accuracy of rank 0 only, averaged over batches of unequal sizes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
inputs = torch.randn(330, 16)
targets = (inputs.sum(1) > 0).long()
train_set, test_set = TensorDataset(inputs[:256], targets[:256]), TensorDataset(inputs[256:], targets[256:])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16, sampler=sampler)
test_loader = DataLoader(test_set, batch_size=10, sampler=DistributedSampler(test_set, shuffle=False))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
model = DistributedDataParallel(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    for batch, target in loader:
        loss = nn.functional.cross_entropy(model(batch.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracies = []
    with torch.no_grad():
        for batch, target in test_loader:
            accuracies.append((model(batch.to(device)).argmax(1).cpu() == target).float().mean())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {torch.stack(accuracies).mean():.3f}")
dist.destroy_process_group()
