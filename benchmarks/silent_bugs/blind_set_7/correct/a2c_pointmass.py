"""Advantage actor-critic on a batch of point masses; observation statistics are shared."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, UPDATES = 32, 16, 60      # ENVS per process
GAMMA, ENTROPY = 0.95, 0.01
MOVES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


class PointMass:
    """Go to the origin; the two coordinates are observed in very different units."""

    def reset(self):
        self.pos = 2 * torch.randn(ENVS, 2)
        return self.observe()

    def observe(self):
        return self.pos * torch.tensor([20.0, 0.2]) + torch.tensor([5.0, 1.0])

    def step(self, action):
        self.pos = self.pos + 0.4 * MOVES[action] + 0.05 * torch.randn_like(self.pos)
        return self.observe(), -self.pos.norm(dim=1)


class ObsNormalizer:
    def __init__(self, dim):
        self.count = torch.tensor(1e-4, dtype=torch.float64)
        self.total = torch.zeros(dim, dtype=torch.float64)
        self.square = torch.full((dim,), 1e-4, dtype=torch.float64)

    def update(self, obs):
        obs = obs.double()
        batch = torch.cat([torch.tensor([float(len(obs))], dtype=torch.float64), obs.sum(0), obs.pow(2).sum(0)])
        dist.all_reduce(batch)
        d = obs.shape[1]
        self.count += batch[0]
        self.total += batch[1:1 + d]
        self.square += batch[1 + d:]

    def __call__(self, obs):
        mean = self.total / self.count
        std = (self.square / self.count - mean ** 2).clamp_min(1e-8).sqrt()
        return ((obs - mean.float()) / std.float()).clamp(-5, 5)


class ActorCritic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi, self.v = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    model = DDP(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    normalizer, env = ObsNormalizer(2), PointMass()
    torch.manual_seed(3000 + rank)      # every process has its own environments
    normalizer.update(env.reset())

    for update in range(1, UPDATES + 1):
        obs, raw, inputs, actions, rewards = env.reset(), [], [], [], []
        with torch.no_grad():
            for _ in range(HORIZON):
                x = normalizer(obs)
                action = torch.distributions.Categorical(logits=model.module(x)[0]).sample()
                raw.append(obs)
                inputs.append(x)
                actions.append(action)
                obs, reward = env.step(action)
                rewards.append(reward)
            ret = model.module(normalizer(obs))[1]
            returns = []
            for reward in reversed(rewards):
                ret = reward + GAMMA * ret
                returns.insert(0, ret)
        inputs, actions, returns = torch.cat(inputs), torch.cat(actions), torch.cat(returns)

        logits, values = model(inputs)
        policy = torch.distributions.Categorical(logits=logits)
        advantage = (returns - values).detach()
        moments = torch.stack([advantage.sum(), advantage.pow(2).sum(), torch.tensor(float(len(advantage)))])
        dist.all_reduce(moments)
        mean = moments[0] / moments[2]
        std = (moments[1] / moments[2] - mean ** 2).clamp_min(1e-8).sqrt()
        policy_loss = -(policy.log_prob(actions) * (advantage - mean) / std).mean()
        loss = policy_loss + 0.05 * F.mse_loss(values, returns) - ENTROPY * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        normalizer.update(torch.cat(raw))

        if update % 10 == 0:
            stats = torch.stack([torch.stack(rewards).mean(), loss.detach(), policy.entropy().mean().detach()])
            dist.all_reduce(stats)
            stats /= world
            if rank == 0:
                print(f"update {update:3d}  reward {stats[0]:.4f}  loss {stats[1]:.4f}  entropy {stats[2]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
