import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.net = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        return x + self.net(self.norm(x))


def build(lr):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), Residual(32), Residual(32), nn.Linear(32, 1))
    model = FSDP(
        net,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=40)


def train(model, optimizer, schedule, steps, g):
    for _ in range(steps):
        x = torch.randn(24, 8, generator=g)
        loss = nn.functional.mse_loss(model(x).squeeze(1), x[:, 0] * x[:, 1] + x[:, 2].cos())
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(5 + rank)
    options = StateDictOptions(full_state_dict=True)
    model, optimizer, schedule = build(8e-3)
    first = train(model, optimizer, schedule, 20, g)
    weights, moments = get_state_dict(model, optimizer, options=options)
    file = io.BytesIO()
    torch.save({"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "g": g.get_state()}, file)
    file.seek(0)

    model, optimizer, schedule = build(8e-3)
    state = torch.load(file)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    schedule.load_state_dict(state["schedule"])
    g.set_state(state["g"])
    second = train(model, optimizer, schedule, 20, g)
    if rank == 0:
        print(f"after 20 updates {first:.4f}, after 40 {second:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
