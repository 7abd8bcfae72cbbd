import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        a, b = self.conv(self.norm(x).transpose(1, 2)).chunk(2, 1)
        return x + (a * b.sigmoid()).transpose(1, 2)


class Tagger(nn.Module):
    def __init__(self, words=90, tags=7, width=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(depth)])
        self.head = nn.Linear(width, tags)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


def sentences(count, g):
    ids = torch.randint(0, 90, (count, 14), generator=g)
    return ids, (ids + (ids.roll(1, 1) > 45)) % 7


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = FSDP(Tagger(), auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
g = torch.Generator().manual_seed(31 + rank)

for step in range(40):
    ids, tags = sentences(12, g)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(0.5)
    optimizer.step()
    scheduler.step()
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.4f}")
dist.destroy_process_group()
