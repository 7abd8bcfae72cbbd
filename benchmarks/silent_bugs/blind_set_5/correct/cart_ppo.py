import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclasses.dataclass
class Config:
    envs: int = 8
    horizon: int = 16
    iterations: int = 6
    epochs: int = 4
    clip: float = 0.2
    target_kl: float = 0.02
    gamma: float = 0.95
    lr: float = 3e-3


class Balance:
    def __init__(self, envs, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.state = torch.randn(envs, 4, generator=self.g)

    def step(self, action):
        push = action * 2.0 - 1
        self.state = 0.9 * self.state + 0.05 * self.state.roll(1, 1)
        self.state[:, 0] += 0.3 * push
        self.state += 0.05 * torch.randn(self.state.shape, generator=self.g)
        return -self.state[:, 0].abs()


class RunningNorm:
    """Mean and variance of everything that all ranks have seen."""

    def __init__(self, size):
        self.sums = torch.tensor([[0.0] * size, [1e-3] * size], dtype=torch.double)
        self.count = torch.tensor(1e-3, dtype=torch.double)

    def add(self, x):
        x = x.flatten(0, -2).double()
        new = torch.stack([x.sum(0), x.square().sum(0)])
        count = torch.tensor(float(len(x)), dtype=torch.double)
        dist.all_reduce(new)
        dist.all_reduce(count)
        self.sums += new
        self.count += count

    def __call__(self, x):
        mean, square = (self.sums / self.count).float()
        return (x - mean) / ((square - mean**2).clamp(min=0) + 1e-4).sqrt()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1)


def whiten(a):
    sums = torch.stack([a.sum(), a.square().sum(), torch.tensor(float(a.numel()))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return (a - mean) / (sums[1] / sums[2] - mean**2 + 1e-8).sqrt()


def main(c):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    env, norm = Balance(c.envs, 40 + rank), RunningNorm(4)
    model = DistributedDataParallel(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=c.lr)
    for iteration in range(c.iterations):
        raw, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(c.horizon):
                logp, _ = model.module(norm(env.state))
                action = torch.multinomial(logp.exp(), 1, generator=env.g).squeeze(1)
                raw.append(env.state.clone())
                actions.append(action)
                rewards.append(env.step(action))
            x = norm(torch.stack(raw))
            actions, returns, tail = torch.stack(actions), [], model.module(norm(env.state))[1]
            for r in reversed(rewards):
                tail = r + c.gamma * tail
                returns.insert(0, tail)
            returns = torch.stack(returns)
            logp, value = model.module(x)
            old = logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            advantage = whiten(returns - value)
        for epoch in range(c.epochs):
            logp, value = model(x)
            new = logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            ratio = (new - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - c.clip, 1 + c.clip) * advantage).mean()
            loss = -gain + 0.5 * (value - returns).pow(2).mean() + 0.01 * (logp.exp() * logp).sum(-1).mean()
            kl = (old - new).mean().detach()
            dist.all_reduce(kl)
            if kl / world > c.target_kl:
                break
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        norm.add(torch.stack(raw))
        reward = torch.stack(rewards).mean()
        dist.all_reduce(reward)
        if rank == 0:
            print(f"iteration {iteration}: reward {reward / world:.3f}, {epoch + 1} epochs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
