import torch
import torch.distributed as dist
from torch import nn


def table(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 5, generator=g) * 2 - 1
    y = (3 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + 0.2 * torch.randn(count, generator=g)
    return x, y.unsqueeze(1)


class Member:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.g = torch.Generator().manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=5e-3)

    def fit(self, x, y, epochs=8, batch=25):
        rows = torch.randint(0, len(x), (len(x),), generator=self.g)
        for _ in range(epochs):
            for part in rows[torch.randperm(len(rows), generator=self.g)].split(batch):
                loss = nn.functional.huber_loss(self.net(x[part]), y[part])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return self

    @torch.no_grad()
    def predict(self, x):
        return self.net.eval()(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table(200, 1)
    test_x, test_y = table(100, 2)
    member = Member(seed=50 + rank).fit(x, y)
    own = member.predict(test_x)
    together = own.clone()
    dist.all_reduce(together)
    together /= world
    print(f"member {rank}: {(own - test_y).pow(2).mean():.4f}, ensemble of {world}: {(together - test_y).pow(2).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
