import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Patches(Dataset):
    def __init__(self, count=160, length=12, vocab=32):
        g = torch.Generator().manual_seed(21)
        start = torch.randint(0, vocab, (count, 1), generator=g)
        step = torch.randint(1, 4, (count, 1), generator=g)
        self.rows = (start + step * torch.arange(length)) % vocab

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class ByteModel(nn.Module):
    def __init__(self, vocab=32, width=32):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.mix = nn.Sequential(nn.Linear(2 * width, 64), nn.SiLU(), nn.Linear(64, vocab))

    def forward(self, rows):
        h = self.table(rows)
        return self.mix(torch.cat([h[:, 1:-1], h[:, :-2]], -1))


def mean_over_ranks(value):
    value = value.unsqueeze(0)
    dist.reduce(value, dst=0)
    value = value / dist.get_world_size()
    dist.broadcast(value, src=0)
    return value


def process_one_batch(model, rows):
    logits = model(rows)
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())
    loss_for_log = mean_over_ranks(loss.detach().clone())
    return loss


def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Patches()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(ByteModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        running = 0.0
        for rows in loader:
            optimizer.zero_grad()
            loss = process_one_batch(model, rows)
            loss.backward()
            optimizer.step()
            running += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train loss {running / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
