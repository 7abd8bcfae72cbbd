"""CLIP-like image tower under FSDP with weight decay for matrices only."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.fc, self.proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.proj(F.gelu(self.fc(self.ln(x))))


class Tower(nn.Module):
    def __init__(self, width=32, layers=2, classes=5):
        super().__init__()
        self.patch = nn.Linear(16, width)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(layers))
        self.ln_post, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, patches):
        x = self.patch(patches) + self.class_embedding
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_post(x.mean(1)))


def images(n=288):
    g = torch.Generator().manual_seed(8)
    proto = torch.randn(5, 4, 16, generator=g)
    y = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(proto[y] + torch.randn(n, 4, 16, generator=g), y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    tower = Tower()
    matrices = {n for n, p in tower.named_parameters() if p.ndim >= 2}
    model = FSDP(tower, auto_wrap_policy=ModuleWrapPolicy({ResidualBlock}), use_orig_params=True,
                 device_id=torch.device("cpu"))
    named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters()]
    gain_or_bias = [p for n, p in named if n not in matrices]
    rest = [p for n, p in named if n in matrices]
    optimizer = torch.optim.AdamW(
        [{"params": gain_or_bias, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}],
        lr=3e-3, betas=(0.9, 0.98))

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
