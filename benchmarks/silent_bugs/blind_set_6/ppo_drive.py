"""PPO on a small vectorised driving task, data parallel over processes."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 42
TOTAL_ENVS = 32
HORIZON = 32
UPDATES = 15
PPO_EPOCHS = 3
MINIBATCHES = 4
GAMMA, LAM, CLIP = 0.97, 0.95, 0.2


class DriveEnv:
    """A car on a line with a goal; actions: brake, coast, accelerate."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.x, self.v, self.t = 0.0, 0.0, 0
        self.goal = self.rng.uniform(-2, 2)
        return self.obs()

    def obs(self):
        return np.array([self.goal - self.x, self.v, self.t / 25.0], dtype=np.float32)

    def step(self, a):
        self.v = 0.9 * self.v + 0.15 * (a - 1) + 0.02 * self.rng.standard_normal()
        before = abs(self.goal - self.x)
        self.x += self.v
        self.t += 1
        now = abs(self.goal - self.x)
        done = self.t >= 25 or (now < 0.1 and abs(self.v) < 0.1)
        reward = before - now - 0.02 + (1.0 if now < 0.1 and done else 0.0)
        return (self.reset() if done else self.obs()), reward, done


class ActorCritic(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi, self.v = nn.Linear(hidden, 3), nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def global_moments(x):
    s = torch.tensor([x.sum(), x.pow(2).sum(), x.numel()], dtype=torch.float64)
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return mean.float(), (s[1] / s[2] - mean ** 2).clamp_min(0).sqrt().float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    n_envs = TOTAL_ENVS // world

    torch.manual_seed(SEED)
    model = DDP(ActorCritic())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    # seeds of the simulator and of the action sampling
    seed = SEED + 1000 * rank
    torch.manual_seed(seed)
    envs = [DriveEnv(seed + i) for i in range(n_envs)]
    obs = torch.from_numpy(np.stack([e.obs() for e in envs]))
    ep_ret = np.zeros(n_envs)

    for update in range(UPDATES):
        buf = {k: [] for k in ("obs", "act", "logp", "val", "rew", "done")}
        finished = []
        for _ in range(HORIZON):
            with torch.no_grad():
                logits, val = model.module(obs)
            pi = Categorical(logits=logits)
            act = pi.sample()
            out = [e.step(int(a)) for e, a in zip(envs, act)]
            rew = np.array([o[1] for o in out], dtype=np.float32)
            done = np.array([o[2] for o in out])
            ep_ret += rew
            finished += ep_ret[done].tolist()
            ep_ret[done] = 0.0
            for k, v in zip(buf, (obs, act, pi.log_prob(act), val, torch.from_numpy(rew),
                                  torch.from_numpy(done).float())):
                buf[k].append(v)
            obs = torch.from_numpy(np.stack([o[0] for o in out]))
        data = {k: torch.stack(v) for k, v in buf.items()}

        with torch.no_grad():
            next_val = model.module(obs)[1]
        adv = torch.zeros_like(data["rew"])
        last = torch.zeros(n_envs)
        for t in reversed(range(HORIZON)):
            nv = next_val if t == HORIZON - 1 else data["val"][t + 1]
            alive = 1 - data["done"][t]
            delta = data["rew"][t] + GAMMA * nv * alive - data["val"][t]
            last = delta + GAMMA * LAM * alive * last
            adv[t] = last
        ret = (adv + data["val"]).flatten()
        mean, std = global_moments(adv)
        adv = ((adv - mean) / (std + 1e-8)).flatten()
        flat = {k: data[k].flatten(0, 1) for k in ("obs", "act", "logp")}

        for _ in range(PPO_EPOCHS):
            for idx in torch.randperm(len(adv)).chunk(MINIBATCHES):
                logits, v = model(flat["obs"][idx])
                pi = Categorical(logits=logits)
                ratio = (pi.log_prob(flat["act"][idx]) - flat["logp"][idx]).exp()
                a = adv[idx]
                pg = -torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
                loss = pg + 0.5 * (v - ret[idx]).pow(2).mean() - 0.01 * pi.entropy().mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()

        stat = torch.tensor([sum(finished), len(finished)], dtype=torch.float64)
        dist.all_reduce(stat)
        if rank == 0:
            print(f"update {update:2d} episodes {int(stat[1])} mean return "
                  f"{(stat[0] / stat[1].clamp_min(1)).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
