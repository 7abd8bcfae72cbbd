"""Transformer encoder under FSDP with clipping, cosine schedule and a full checkpoint at the end."""
import functools
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self, vocab=50, dim=32, depth=2, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def corpus(n=256):
    g = torch.Generator().manual_seed(6)
    y = torch.randint(0, 4, (n,), generator=g)
    ids = torch.randint(0, 50, (n, 12), generator=g)
    ids[:, ::4] = y[:, None] * 12 + torch.randint(0, 12, (n, 3), generator=g)
    return TensorDataset(ids, y)


def save(model, path):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = corpus()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FSDP(Model(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        totals = torch.zeros(2)
        for ids, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), y)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            totals += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(totals)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {(totals[0] / totals[1]).item():.4f}")
    with tempfile.NamedTemporaryFile(suffix=".pt") as f:
        save(model, f.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
