"""REINFORCE on bandit problems with context; own seeds by rank, the advantage is normalised over all ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class Bandits:
    """The best arm depends on the context; one environment object a rank."""

    def __init__(self, arms=5, context=6, seed=0):
        self.table = torch.randn(context, arms, generator=torch.Generator().manual_seed(123))
        self.g = torch.Generator().manual_seed(seed)

    def contexts(self, n):
        self.c = torch.randn(n, len(self.table), generator=self.g)
        return self.c

    def pull(self, action):
        mean = (self.c @ self.table).gather(1, action[:, None]).squeeze(1)
        return mean + 0.2 * torch.randn(len(action), generator=self.g)


def normalise_globally(values):
    stats = torch.stack([values.sum(), values.pow(2).sum(), torch.tensor(float(len(values)))])
    dist.all_reduce(stats)
    mean = stats[0] / stats[2]
    std = (stats[1] / stats[2] - mean ** 2).clamp(min=0).sqrt()
    return (values - mean) / (std + 1e-6), mean


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 5))

    def forward(self, c):
        return self.net(c)


def main(updates=25, batch=64):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(10 + rank)
    env = Bandits(seed=500 + rank)
    policy = DDP(Policy())  # the weights of rank 0 go to all
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for update in range(updates):
        logits = policy(env.contexts(batch))
        pi = Categorical(logits=logits)
        action = pi.sample()
        reward = env.pull(action)
        advantage, mean = normalise_globally(reward)
        loss = -(pi.log_prob(action) * advantage).mean() - 0.01 * pi.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and update % 8 == 0:
            print(f"update {update}: mean reward {mean.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
