import torch
import torch.distributed as dist
from torch import nn


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )


def average_gradients(model, world):
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def make_batch(generator, n, noisy):
    images = torch.randn(n, 3, 16, 16, generator=generator) * (3.0 if noisy else 1.0)
    labels = torch.randint(0, 5, (n,), generator=generator)
    images += labels.view(-1, 1, 1, 1) * 0.3
    return images, labels


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
model = conv_net()
for p in model.parameters():
    dist.broadcast(p.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
generator = torch.Generator().manual_seed(50 + rank)
for step in range(20):
    images, labels = make_batch(generator, 12, noisy=rank == 1)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    average_gradients(model, world)
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1} loss {loss.item():.4f}")
dist.destroy_process_group()
