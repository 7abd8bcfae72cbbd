import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def net():
    return nn.Sequential(
        nn.Linear(20, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 5)
    )


def groups(module, wd):
    """Taken from the module before it is wrapped: names of the parameters without decay."""
    return {n for n, p in module.named_parameters() if p.ndim < 2}


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
module = net()
plain = groups(module, 0.1)
wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=2000)
model = FSDP(module, auto_wrap_policy=wrap, use_orig_params=True, device_id=torch.device("cpu"))


def original(name):
    return name.replace("_fsdp_wrapped_module.", "")


named = list(model.named_parameters())
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in named if original(n) not in plain], "weight_decay": 0.1},
        {"params": [p for n, p in named if original(n) in plain], "weight_decay": 0.0},
    ],
    lr=5e-3,
)
g = torch.Generator().manual_seed(600 + rank)
for step in range(16):
    # two micro-batches of the same size; the first one is not communicated
    with model.no_sync():
        x = torch.randn(8, 20, generator=g)
        (nn.functional.cross_entropy(model(x), x[:, :5].argmax(1)) / 2).backward()
    x = torch.randn(8, 20, generator=g)
    loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
    (loss / 2).backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 4 == 3:
        print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.4f}")
dist.destroy_process_group()
