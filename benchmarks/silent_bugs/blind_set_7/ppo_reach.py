"""PPO on a batch of simulated reaching tasks; each process has its own environments."""
import torch
import torch.distributed as dist
import torch.nn as nn

HORIZON, NUM_ENVS, GAMMA, LAMBDA = 32, 16, 0.97, 0.95


class ReachEnvs:
    """A point with velocity has to move to a goal on a line."""

    def reset(self):
        self.pos = torch.rand(NUM_ENVS) * 2 - 1
        self.vel = torch.zeros(NUM_ENVS)
        self.goal = torch.rand(NUM_ENVS) * 2 - 1
        self.t = 0
        return self.observe()

    def observe(self):
        time = torch.full((NUM_ENVS,), self.t / HORIZON)
        return torch.stack([self.pos, self.vel, self.goal, time], dim=1)

    def step(self, action):
        self.t += 1
        self.vel = 0.9 * self.vel + 0.1 * action.clamp(-1, 1) + 0.01 * torch.randn(NUM_ENVS)
        self.pos = self.pos + self.vel
        return self.observe(), -(self.pos - self.goal).abs()


def mlp(out, gain):
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, out))
    for i, layer in enumerate(m for m in net if isinstance(m, nn.Linear)):
        nn.init.orthogonal_(layer.weight, gain if i == 2 else 2 ** 0.5)
        nn.init.zeros_(layer.bias)
    return net


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(1, 0.01), mlp(1, 1.0)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def policy(self, obs):
        return torch.distributions.Normal(self.actor(obs)[..., 0], self.log_std.exp())

    def value(self, obs):
        return self.critic(obs)[..., 0]


def average_gradients(agent, world):
    grads = torch.cat([p.grad.view(-1) for p in agent.parameters()])
    dist.all_reduce(grads)
    grads /= world
    offset = 0
    for p in agent.parameters():
        p.grad.copy_(grads[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def normalise(adv):
    """Mean and variance over the rollouts of all processes."""
    sums = torch.stack([adv.sum(), (adv ** 2).sum(), torch.tensor(float(adv.numel()))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return (adv - mean) / ((sums[1] / sums[2] - mean ** 2).clamp(min=0).sqrt() + 1e-8)


@torch.no_grad()
def rollout(agent, envs):
    obs, data = envs.reset(), []
    for _ in range(HORIZON):
        dist_ = agent.policy(obs)
        action = dist_.sample()
        nxt, reward = envs.step(action)
        data.append((obs, action, dist_.log_prob(action), agent.value(obs), reward))
        obs = nxt
    obs, action, logp, value, reward = (torch.stack(x) for x in zip(*data))
    adv, last = torch.zeros_like(reward), torch.zeros(NUM_ENVS)
    for t in reversed(range(HORIZON)):
        nxt_value = value[t + 1] if t + 1 < HORIZON else torch.zeros(NUM_ENVS)
        last = reward[t] + GAMMA * nxt_value - value[t] + GAMMA * LAMBDA * last
        adv[t] = last
    return obs, action, logp, normalise(adv), adv + value, reward.sum(0)


def main(seed=1, iterations=40):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(seed + rank)
    envs, agent = ReachEnvs(), Agent()
    for p in agent.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(agent.parameters(), lr=2e-3, eps=1e-5)
    for it in range(iterations):
        obs, action, old_logp, adv, returns, episode = rollout(agent, envs)
        for _ in range(4):
            pi = agent.policy(obs)
            ratio = (pi.log_prob(action) - old_logp).exp()
            policy_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            value_loss = 0.5 * (agent.value(obs) - returns).pow(2).mean()
            loss = policy_loss + 0.5 * value_loss - 0.002 * pi.entropy().mean()
            opt.zero_grad()
            loss.backward()
            average_gradients(agent, world)
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
        score = episode.mean()
        dist.all_reduce(score)
        if rank == 0 and (it + 1) % 5 == 0:
            print(f"iteration {it + 1} mean return {score.item() / world:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
