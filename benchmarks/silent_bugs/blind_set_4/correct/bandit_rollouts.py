import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ActorCritic(nn.Module):
    def __init__(self, obs=8, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 48), nn.Tanh())
        self.pi, self.v = nn.Linear(48, actions), nn.Linear(48, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h).log_softmax(-1), self.v(h).squeeze(-1)


class RunningStats:
    """Mean and variance of all observations that all ranks have seen."""

    def __init__(self, size):
        self.total = torch.zeros(2 * size + 1, dtype=torch.float64)
        self.size = size

    def update(self, x):
        x = x.double()
        part = torch.cat([x.sum(0), x.pow(2).sum(0), torch.tensor([float(len(x))], dtype=torch.float64)])
        dist.all_reduce(part)
        self.total += part

    def __call__(self, x):
        n = self.total[-1]
        mean = self.total[: self.size] / n
        var = self.total[self.size : -1] / n - mean**2
        return ((x - mean) / (var + 1e-4).sqrt()).float()


def global_whiten(a):
    s = torch.stack([a.sum(), a.pow(2).sum(), torch.tensor(float(len(a)))])
    dist.all_reduce(s)
    mean, var = s[0] / s[2], s[1] / s[2] - (s[0] / s[2]) ** 2
    return (a - mean) / (var.sqrt() + 1e-6)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stats = RunningStats(8)
    env = torch.Generator().manual_seed(1000 + rank)  # every rank has its own environments
    for it in range(8):
        raw = torch.randn(48, 8, generator=env) * 3 + 1
        stats.update(raw)
        obs = stats(raw)
        with torch.no_grad():
            logp_old, value = model.module(obs)  # rollouts need no gradient
            action = torch.multinomial(logp_old.exp(), 1, generator=env).squeeze(1)
        reward = (action == raw[:, :4].argmax(1)).float()
        advantage = global_whiten(reward - value)
        old = logp_old.gather(1, action.unsqueeze(1)).squeeze(1)
        for _ in range(2):
            logp, v = model(obs)
            ratio = (logp.gather(1, action.unsqueeze(1)).squeeze(1) - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = -gain + 0.5 * (v - reward).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = reward.mean()
        dist.all_reduce(mean)
        if rank == 0 and it % 2:
            print(f"iteration {it + 1} reward {mean.item() / dist.get_world_size():.3f} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
