import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(x)


class TinyViT(nn.Module):
    def __init__(self, dim=32, classes=6):
        super().__init__()
        self.patch = nn.Linear(48, dim)
        self.layers = nn.Sequential(Layer(dim), Layer(dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, patches):
        return self.head(self.norm(self.layers(self.patch(patches))).mean(1))


def decays(name, p):
    return name.endswith("weight") and "norm" not in name


def build_optimizer(model, wd):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": wd},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=2e-3)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = FSDP(
        TinyViT(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = build_optimizer(model, wd=0.8)
    g = torch.Generator().manual_seed(rank + 1)
    for step in range(12):
        patches = torch.randn(8, 9, 48, generator=g)
        labels = patches[:, 0, :6].argmax(1)
        loss = nn.functional.cross_entropy(model(patches), labels)
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if rank == 0 and step % 3 == 2:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
