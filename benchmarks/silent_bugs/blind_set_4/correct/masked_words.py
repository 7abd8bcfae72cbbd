import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, MASK = 26, 25


class Bert(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.word = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.word.weight, std=0.2)
        self.position = nn.Parameter(torch.randn(12, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, ids, picked):
        h = self.encoder(self.word(ids) + self.position)
        return h[picked] @ self.word.weight.t() + self.bias


def mask_tokens(ids, generator):
    picked = torch.rand(ids.shape, generator=generator) < 0.2
    return ids.masked_fill(picked, MASK), picked


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Bert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    words = torch.Generator().manual_seed(20 + rank)
    masks = torch.Generator().manual_seed(80 + rank)
    for step in range(15):
        ids = (torch.randint(0, 25, (6, 1), generator=words) + torch.arange(12)) % 25
        corrupted, picked = mask_tokens(ids, masks)
        count = picked.sum().float()
        dist.all_reduce(count)
        logits = model(corrupted, picked)
        # a rank without a masked word contributes a zero that still reaches the parameters
        loss = F.cross_entropy(logits, ids[picked], reduction="sum") * world / count.clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {shown.item() / world:.4f} ({int(count)} masked words)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
