import torch
import torch.distributed as dist
from torch import nn


class MultiTask(nn.Module):
    """A common trunk and one head per task."""

    def __init__(self, tasks=("depth", "normals")):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Conv2d(12, 3, 1) for t in tasks})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


class Reducer:
    """Averages the gradients of all ranks in one call."""

    def __init__(self, params):
        self.params = list(params)
        for p in self.params:
            dist.broadcast(p.data, src=0)

    def __call__(self):
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        live = self.params
        flat = torch.cat([p.grad.reshape(-1) for p in live])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(live, flat.split([p.numel() for p in live])):
            p.grad.copy_(part.view_as(p))


def scene(task, g):
    image = torch.rand(6, 3, 10, 10, generator=g)
    if task == "depth":
        return image, image.mean(1, keepdim=True).expand(-1, 3, -1, -1) * 2 - 1
    return image, image - image.roll(1, dims=3)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    model = MultiTask()
    average = Reducer(model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(80 + rank)
    names = list(model.heads)
    for step in range(40):
        task = names[(step // 4 + rank) % len(names)]
        image, target = scene(task, g)
        loss = nn.functional.l1_loss(model(image, task), target)
        optimizer.zero_grad()
        loss.backward()
        average()
        optimizer.step()
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1:2d} {task:8s} {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
