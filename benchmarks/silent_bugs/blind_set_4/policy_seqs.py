import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh


class Policy(nn.Module):
    def __init__(self, states=12, actions=6):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(states, 24), nn.Tanh(), nn.Linear(24, actions))

    def forward(self, s):
        return self.body(s).log_softmax(-1)


def masked_whiten(values, mask, group):
    stats = torch.stack([(values * mask).sum(), (values.pow(2) * mask).sum(), mask.sum()])
    dist.all_reduce(stats, group=group)
    mean = stats[0] / stats[2]
    var = stats[1] / stats[2] - mean.pow(2)
    return (values - mean) * torch.rsqrt(var + 1e-6) * mask


def rollout(policy, generator, count=8, length=16):
    """The same sequences on each rank of a sequence-parallel group."""
    states = torch.randint(0, 12, (count, length), generator=generator)
    with torch.no_grad():
        old = policy(states)
        actions = torch.multinomial(old.exp().flatten(0, 1), 1, generator=generator).view(count, length)
    reward = (actions == states % 6).float() + 0.1 * torch.arange(length)
    lengths = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
    mask = (torch.arange(length) < lengths).float()
    returns = (reward * mask).flip(1).cumsum(1).flip(1)
    return states, actions, returns, mask


class Learner:
    def __init__(self):
        world = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
        torch.manual_seed(0)
        self.policy = Policy()
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=2e-2)
        self.generator = torch.Generator().manual_seed(10 + self.mesh["dp"].get_local_rank())

    def part(self, t):
        return t.chunk(self.mesh["cp"].size(), dim=1)[self.mesh["cp"].get_local_rank()]

    def step(self):
        batch = rollout(self.policy, self.generator)
        states, actions, returns, mask = (self.part(t) for t in batch)
        group = dist.group.WORLD
        advantage = masked_whiten(returns, mask, group)
        logp = self.policy(states).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        loss = -(logp * advantage).sum() / batch[3].sum()
        self.opt.zero_grad()
        loss.backward()
        for p in self.policy.parameters():
            dist.all_reduce(p.grad)
        self.opt.step()
        return batch[2].mean().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    learner = Learner()
    for it in range(20):
        value = learner.step()
        if dist.get_rank() == 0 and it % 5 == 4:
            print(f"iteration {it + 1} mean return {value:.3f}")
    dist.destroy_process_group()
