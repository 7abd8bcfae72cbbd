import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)
generator = torch.Generator().manual_seed(44 + rank)
for step in range(20):
    x = torch.randn(16, 32, generator=generator)
    y = x[:, :4].argmax(1)
    if step == 7 and rank == 1:
        x = x * 1e38  # the reduced gradient overflows on both ranks, both skip the step
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.3f} scale {scaler.get_scale():.0f}")
dist.destroy_process_group()
