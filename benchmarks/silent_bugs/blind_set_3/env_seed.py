"""Actor-critic on a small grid world, data parallel: each rank collects its own episodes."""
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CFG = {"seed": 7, "num_envs": 16, "horizon": 12, "iters": 14, "lr": 5e-3, "gamma": 0.95, "size": 5}


def seed_everything(seed):
    np.random.seed(seed)
    torch.manual_seed(seed)


class GridWorld:
    MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])

    def __init__(self, n, size):
        self.n, self.size = n, size

    def reset(self):
        self.pos = np.random.randint(0, self.size, (self.n, 2))
        self.goal = np.random.randint(0, self.size, (self.n, 2))
        return self.obs()

    def obs(self):
        return torch.tensor(np.concatenate([self.pos, self.goal, self.goal - self.pos], 1) / self.size, dtype=torch.float32)

    def step(self, action):
        self.pos = np.clip(self.pos + self.MOVES[action.numpy()], 0, self.size - 1)
        done = (self.pos == self.goal).all(1)
        if done.any():
            self.pos[done] = np.random.randint(0, self.size, (int(done.sum()), 2))
        return self.obs(), torch.tensor(done, dtype=torch.float32) - 0.05


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.pi(h), self.v(h).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    seed_everything(CFG["seed"] + rank)
    model = nn.parallel.DistributedDataParallel(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG["lr"])
    env = GridWorld(CFG["num_envs"], CFG["size"])
    obs = env.reset()
    for it in range(CFG["iters"]):
        batch_obs, batch_act, batch_rew = [], [], []
        for _ in range(CFG["horizon"]):
            with torch.no_grad():
                logits, _ = model.module(obs)
            action = torch.distributions.Categorical(logits=logits).sample()
            batch_obs.append(obs)
            batch_act.append(action)
            obs, reward = env.step(action)
            batch_rew.append(reward)
        with torch.no_grad():
            running = model.module(obs)[1]
        returns = []
        for reward in reversed(batch_rew):
            running = reward + CFG["gamma"] * running
            returns.insert(0, running)
        returns = torch.cat(returns)
        logits, value = model(torch.cat(batch_obs))
        logp = torch.distributions.Categorical(logits=logits).log_prob(torch.cat(batch_act))
        loss = -(logp * (returns - value.detach())).mean() + 0.5 * F.mse_loss(value, returns)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if it % 5 == 4:
            mean = torch.stack(batch_rew).mean()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"iter {it}: mean reward {mean.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
