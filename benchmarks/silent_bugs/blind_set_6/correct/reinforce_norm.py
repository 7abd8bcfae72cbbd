"""Policy gradient with a value baseline on a small control task; running observation statistics over all processes."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, ITERATIONS, GAMMA = 32, 20, 30, 0.95


class PointMass:
    """A point on a line is pushed left or right and should stay near zero. Observations have very different scales."""

    def __init__(self, n, generator):
        self.n, self.g = n, generator

    def reset(self):
        self.x = 4 * torch.rand(self.n, generator=self.g) - 2
        self.v = torch.zeros(self.n)
        return self.obs()

    def obs(self):
        return torch.stack([100 * self.x + 30, 0.1 * self.v], dim=1)

    def step(self, action):
        push = (action.float() * 2 - 1) * 0.3 + 0.05 * torch.randn(self.n, generator=self.g)
        self.v = 0.9 * self.v + push
        self.x = self.x + self.v * 0.3
        return self.obs(), -self.x.abs()


class RunningNorm:
    def __init__(self, size):
        self.count = torch.tensor(0.0, dtype=torch.float64)
        self.sum = torch.zeros(size, dtype=torch.float64)
        self.sq = torch.zeros(size, dtype=torch.float64)

    def update(self, x):
        """Adds the observations of all processes."""
        x = x.double()
        new = torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), x.sum(0), (x ** 2).sum(0)])
        dist.all_reduce(new)
        k = len(self.sum)
        self.count += new[0]
        self.sum += new[1:1 + k]
        self.sq += new[1 + k:]

    def __call__(self, x):
        mean = self.sum / self.count
        var = (self.sq / self.count - mean ** 2).clamp(min=1e-8)
        return ((x - mean) / var.sqrt()).float().clamp(-5, 5)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.actor(obs), self.critic(obs)[..., 0]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(ActorCritic())
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(10 + rank)      # environments and actions of this process
    env, norm = PointMass(ENVS, g), RunningNorm(2)
    norm.update(env.reset())                          # some statistics before the first action

    for it in range(ITERATIONS):
        raw, actions, rewards = [], [], []
        obs = env.reset()
        with torch.no_grad():
            for _ in range(HORIZON):
                logits, _ = net.module(norm(obs))
                act = torch.multinomial(logits.softmax(1), 1, generator=g)[:, 0]
                raw.append(obs)
                actions.append(act)
                obs, reward = env.step(act)
                rewards.append(reward)
        returns, ret = [], torch.zeros(ENVS)
        for reward in reversed(rewards):
            ret = reward + GAMMA * ret
            returns.insert(0, ret)
        raw, actions, returns = torch.cat(raw), torch.cat(actions), torch.cat(returns)

        logits, value = net(norm(raw))
        adv = returns - value.detach()
        moments = torch.stack([adv.sum(), (adv ** 2).sum(), torch.tensor(float(len(adv)))])
        dist.all_reduce(moments)
        mean = moments[0] / moments[2]
        std = (moments[1] / moments[2] - mean ** 2).clamp(min=1e-8).sqrt()
        log_p = logits.log_softmax(1)
        policy_loss = -(log_p.gather(1, actions[:, None])[:, 0] * (adv - mean) / std).mean()
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        loss = policy_loss + 0.5 * (value - returns).pow(2).mean() - 0.01 * entropy
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        norm.update(raw)

        score = torch.stack(rewards).sum(0).mean()
        dist.all_reduce(score)
        if rank == 0 and (it + 1) % 5 == 0:
            print(f"iteration {it + 1} mean return {score.item() / world:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
