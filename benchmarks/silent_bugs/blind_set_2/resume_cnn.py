import os
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def stripes(n, seed):
    """Horizontal, vertical and diagonal stripes, 12 x 12."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r, c = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    kinds = torch.stack([r, c, r + c])
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    x = torch.sin(kinds[y] * 1.3 + phase) + 0.5 * torch.randn(n, 12, 12, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3)
        self.c2 = nn.Conv2d(8, 12, 3, stride=2)
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x))))
        return self.fc(x.mean((2, 3)))


def make(lr=0.05):
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    return model, opt


def save(path, model, opt, epoch):
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def restore(path, model, opt):
    ckpt = torch.load(path, map_location="cpu")
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    return ckpt["epoch"] + 1


def train(model, opt, data, first, last):
    sampler = DistributedSampler(data, seed=4)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print("epoch", epoch, "loss", round(total.item() / len(loader) / dist.get_world_size(), 5))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = stripes(256, 1)
    path = os.path.join(tempfile.gettempdir(), "blind2", "resume_cnn.pt")

    model, opt = make()
    model = DDP(model)
    train(model, opt, data, 0, 2)
    save(path, model, opt, epoch=1)

    # the job was pre-empted here; a new one goes on from the file
    model, opt = make()
    start = restore(path, model, opt)
    model = DDP(model)
    train(model, opt, data, start, 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
