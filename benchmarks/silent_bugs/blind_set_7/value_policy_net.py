"""Policy + value network on board positions; gradients averaged by hand."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BOARD = 8 * 8 * 3
MOVES = 40
TOTAL_BATCH = 64
TOTAL_STEPS = 160
MAX_GRAD_NORM = 0.6


def load_positions(n, seed):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.Generator().manual_seed(17)
    wp = torch.randn(BOARD, MOVES, generator=teacher) / BOARD ** 0.5
    wv = torch.randn(BOARD, generator=teacher) / BOARD ** 0.5
    planes = (torch.rand(n, BOARD, generator=g) < 0.3).float()
    policy = torch.softmax(6 * (planes - 0.3) @ wp, dim=1)
    value = torch.tanh(4 * (planes - 0.3) @ wv + 0.3 * torch.randn(n, generator=g))
    return planes, policy, value


class Net(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(BOARD, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.policy = nn.Linear(width, MOVES)
        self.value = nn.Linear(width, 1)

    def forward(self, planes):
        h = self.trunk(planes)
        return self.policy(h), torch.tanh(self.value(h)).squeeze(-1)


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


def losses(model, planes, policy, value):
    logits, v = model(planes)
    policy_loss = -(policy * F.log_softmax(logits, dim=1)).sum(1).mean()
    value_loss = F.mse_loss(v, value)
    return policy_loss, value_loss


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert TOTAL_BATCH % world == 0
    local_batch = TOTAL_BATCH // world

    torch.manual_seed(2021)
    model = Net()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)

    planes, policy, value = load_positions(1024, seed=1)
    test = load_positions(256, seed=2)
    shuffle = torch.Generator().manual_seed(5)      # same order on every process

    step = 0
    while step < TOTAL_STEPS:
        order = torch.randperm(len(planes), generator=shuffle)
        for batch in order.split(TOTAL_BATCH):
            mine = batch[rank * local_batch:(rank + 1) * local_batch]
            policy_loss, value_loss = losses(model, planes[mine], policy[mine], value[mine])
            optimizer.zero_grad()
            (policy_loss + value_loss).backward()
            average_gradients(model)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            warmup.step()
            step += 1

            if step % 20 == 0:
                logs = torch.stack([policy_loss.detach(), value_loss.detach()])
                dist.all_reduce(logs)
                logs /= world
                if rank == 0:
                    with torch.no_grad():
                        tp, tv = losses(model, *test)
                    print(f"step {step:4d}  policy {logs[0]:.4f}  value {logs[1]:.4f}  grad norm {grad_norm:.3f}"
                          f"  test policy {tp:.4f}  test value {tv:.4f}")
            if step >= TOTAL_STEPS:
                break

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
