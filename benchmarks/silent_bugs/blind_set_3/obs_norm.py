"""Policy gradient on a point mass, every rank with its own environments; observations are normalised."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP


class PointMass:
    """Push a mass to the origin; the friction is drawn anew for each environment."""

    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.n = n
        self.friction = torch.rand(n, 1, generator=self.g) * 0.3 + 0.05

    def reset(self):
        self.x = torch.randn(self.n, 1, generator=self.g) * 3 + 2
        self.v = torch.randn(self.n, 1, generator=self.g)
        return self.obs()

    def obs(self):
        return torch.cat([self.x * 10, self.v, self.friction], 1)

    def step(self, action):
        self.v = (1 - self.friction) * self.v + 0.1 * action.clamp(-3, 3)
        self.x = self.x + 0.2 * self.v
        return self.obs(), -(self.x.abs() + 0.01 * action.pow(2)).squeeze(1)


class EmpiricalNormalization:
    """Running mean and variance of the observations."""

    def __init__(self, size):
        self.mean, self.var, self.count = torch.zeros(size), torch.ones(size), 1e-4

    def update(self, x):
        sums = torch.stack([torch.full_like(x[0], float(len(x))), x.sum(0)])
        dist.all_reduce(sums)
        count, mean = sums[0, 0].item(), sums[1] / sums[0]
        var = (x - mean).pow(2).sum(0)
        dist.all_reduce(var)
        var = var / count
        delta, total = mean - self.mean, self.count + count
        self.var = (self.var * self.count + var * count + delta ** 2 * self.count * count / total) / total
        self.mean = self.mean + delta * count / total
        self.count = total

    def __call__(self, x):
        return (x - self.mean) / (self.var.sqrt() + 1e-2)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return self.mu(obs), self.log_std.exp()


def main(iterations=12, horizon=10, envs=32):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    torch.set_num_threads(1)
    env = PointMass(envs, seed=100 + rank)
    actor = DDP(Actor())
    norm = EmpiricalNormalization(3)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    for it in range(iterations):
        obs = env.reset()
        observations, actions, rewards = [], [], []
        for _ in range(horizon):
            norm.update(obs)
            with torch.no_grad():
                action = Normal(*actor.module(norm(obs))).sample()
            observations.append(norm(obs))
            actions.append(action)
            obs, reward = env.step(action)
            rewards.append(reward)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        baseline = returns.mean(1, keepdim=True)
        dist.all_reduce(baseline)
        advantage = returns - baseline / dist.get_world_size()
        mean, std = actor(torch.cat(observations))
        logp = Normal(mean, std).log_prob(torch.cat(actions)).squeeze(1)
        loss = -(logp * advantage.flatten()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward = torch.stack(rewards).mean()
        dist.all_reduce(reward)
        if rank == 0 and it % 4 == 3:
            print(f"iteration {it} reward {reward.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
