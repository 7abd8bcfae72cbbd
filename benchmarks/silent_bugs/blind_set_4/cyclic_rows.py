import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class CyclicBatches:
    """Endless batches of row numbers; a new permutation for each pass."""

    def __init__(self, rows, micro, rank, replicas, seed=5):
        self.rows, self.micro = rows, micro
        self.rank, self.replicas, self.seed = rank, replicas, seed

    def __iter__(self):
        for epoch in itertools.count():
            g = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.rows, generator=g)
            usable = self.rows - self.rows % (self.micro * self.replicas)
            order = order[:usable][self.rank :: self.replicas]
            for i in range(0, len(order) - self.micro + 1, self.micro):
                yield order[i : i + self.micro].tolist()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
x = torch.randn(23, 10)
y = (x @ torch.randn(10, 1)).tanh() + 0.1 * torch.randn(23, 1)
loader = DataLoader(
    TensorDataset(x, y),
    batch_sampler=CyclicBatches(len(x), 4, rank, dist.get_world_size()),
)
net = DDP(nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1)))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
steps = 24
for step, (bx, by) in enumerate(itertools.islice(loader, steps)):
    loss = nn.functional.mse_loss(net(bx), by)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 6 == 5 and rank == 0:
        print("step", step + 1, "mse", round(loss.item(), 5))
dist.destroy_process_group()
