"""Advantage actor-critic on a vectorised toy point-mass, one set of environments per rank."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class PointMass:
    def __init__(self, n, seed):
        self.n, self.g = n, torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.pos = 5 + 20 * torch.rand(self.n, generator=self.g)
        self.vel = torch.zeros(self.n)
        return self.obs()

    def obs(self):
        return torch.stack([self.pos, self.vel], 1)

    def step(self, action):
        self.vel = 0.9 * self.vel + (action.float() - 1.0)
        self.pos = self.pos + self.vel
        return self.obs(), -self.pos.abs() / 25


class RunningNorm:
    def __init__(self, dim):
        self.count = torch.tensor(1e-4)
        self.total = torch.zeros(dim)
        self.square = torch.zeros(dim)

    def update(self, x):
        flat = torch.cat([x.sum(0), x.pow(2).sum(0), torch.tensor([float(len(x))])])
        dist.all_reduce(flat)
        d = x.shape[1]
        self.total += flat[:d]
        self.square += flat[d:2 * d]
        self.count += flat[-1]

    def __call__(self, x):
        mean = self.total / self.count
        var = (self.square / self.count - mean ** 2).clamp(min=1e-4)
        return ((x - mean) / var.sqrt()).clamp(-5, 5)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.pi = nn.Linear(32, 3)
        self.v = nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


def main(updates=8, horizon=10, envs=16, gamma=0.95):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(ActorCritic())
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    env = PointMass(envs, seed=100 + rank)
    act_gen = torch.Generator().manual_seed(200 + rank)
    norm = RunningNorm(2)
    for u in range(updates):
        obs, states, actions, rewards = env.reset(), [], [], []
        raw = []
        for _ in range(horizon):
            raw.append(obs)
            s = norm(obs)
            with torch.no_grad():
                logits, _ = net.module(s)
            a = torch.multinomial(logits.softmax(-1), 1, generator=act_gen).squeeze(1)
            obs, r = env.step(a)
            states.append(s); actions.append(a); rewards.append(r)
        ret, returns = torch.zeros(envs), []
        for r in reversed(rewards):
            ret = r + gamma * ret
            returns.append(ret)
        returns = torch.cat(returns[::-1])
        logits, value = net(torch.cat(states))
        logp = logits.log_softmax(-1).gather(1, torch.cat(actions)[:, None]).squeeze(1)
        adv = returns - value.detach()
        loss = -(logp * adv).mean() + 0.5 * (returns - value).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        norm.update(torch.cat(raw))
        score = torch.cat(rewards).mean()
        dist.all_reduce(score)
        if rank == 0:
            print(f"update {u} reward {score.item() / world:.4f}")
    if rank == 0:
        torch.save({"net": net.module.state_dict(), "total": norm.total, "square": norm.square,
                    "count": norm.count}, "/tmp/blind2/actor_critic.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
