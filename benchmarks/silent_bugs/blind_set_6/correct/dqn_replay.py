"""DQN with one replay buffer per process, gradients averaged by DDP, target network."""
import copy
import random
from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SEED, SIZE, GAMMA = 3, 6, 0.95
ENV_STEPS, WARM, BATCH, TARGET_EVERY = 1200, 200, 32, 50


class GridWorld:
    """Walk on a SIZE x SIZE grid to the goal."""

    MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.reset()

    def reset(self):
        self.pos = [self.rng.randrange(SIZE), self.rng.randrange(SIZE)]
        self.goal = [self.rng.randrange(SIZE), self.rng.randrange(SIZE)]
        self.t = 0
        return self.obs()

    def obs(self):
        return F.one_hot(torch.tensor([*self.pos, *self.goal]), SIZE).float().flatten()

    def step(self, a):
        self.pos = [min(SIZE - 1, max(0, p + m)) for p, m in zip(self.pos, self.MOVES[a])]
        self.t += 1
        reached = self.pos == self.goal
        return self.obs(), (1.0 if reached else -0.05), reached, self.t >= 20


def q_network():
    return nn.Sequential(nn.Linear(4 * SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@torch.no_grad()
def evaluate(net, rank, world, episodes=60):
    """Greedy policy on fixed starts; episode k is played by rank k % world."""
    stat = torch.zeros(2)
    for k in range(rank, episodes, world):
        env = GridWorld(50_000 + k)
        obs, done = env.obs(), env.pos == env.goal
        while not done and env.t < 20:
            obs, _, done, _ = env.step(int(net(obs).argmax()))
        stat += torch.tensor([float(done), 1.0])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    net = q_network()
    target = copy.deepcopy(net).requires_grad_(False)
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    # each process explores on its own
    rng = random.Random(SEED + 7919 * (rank + 1))
    env = GridWorld(rng.randrange(10 ** 9))
    replay = deque(maxlen=2000)
    obs, updates, run = env.obs(), 0, torch.zeros(2)
    for step in range(1, ENV_STEPS + 1):
        eps = max(0.1, 1.0 - step / 800)
        if rng.random() < eps:
            act = rng.randrange(4)
        else:
            with torch.no_grad():
                act = int(net(obs).argmax())
        nxt, rew, reached, timeout = env.step(act)
        replay.append((obs, act, rew, nxt, float(reached)))
        obs = env.reset() if reached or timeout else nxt
        if step < WARM or step % 2:
            continue

        o, a, r, n, d = zip(*rng.sample(replay, BATCH))
        o, n = torch.stack(o), torch.stack(n)
        a, r, d = torch.tensor(a), torch.tensor(r), torch.tensor(d)
        with torch.no_grad():
            best = net(n).argmax(1, keepdim=True)  # double DQN
            y = r + GAMMA * (1 - d) * target(n).gather(1, best).squeeze(1)
        q = model(o).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        opt.step()
        run += torch.tensor([loss.item(), 1.0])
        updates += 1
        if updates % TARGET_EVERY == 0:
            target.load_state_dict(net.state_dict())
            dist.all_reduce(run)
            success = evaluate(net, rank, world)
            if rank == 0:
                print(f"updates {updates} loss {run[0] / run[1]:.4f} eps {eps:.2f} success {success:.3f}", flush=True)
            run.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
