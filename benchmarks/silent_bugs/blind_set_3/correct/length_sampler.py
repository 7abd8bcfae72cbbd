"""A sampler of one's own: sorted by length within chunks, dealt out to the ranks, reseeded by epoch; token-weighted loss."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

IGNORE = -100


class Tagging(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(22)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(3, 20, (1,), generator=g))
            words = torch.randint(1, 40, (length,), generator=g)
            self.items.append((words, (words + words.roll(1)) % 5))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class SortishSampler:
    def __init__(self, data, batch_size, chunk=64, seed=0):
        self.lengths = [len(w) for w, _ in data.items]
        self.batch_size, self.chunk, self.seed, self.epoch = batch_size, chunk, seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        for start in range(0, len(order), self.chunk):
            part = sorted(order[start:start + self.chunk], key=lambda i: self.lengths[i])
            yield from part[self.rank::self.world]

    def __len__(self):
        return len(self.lengths) // self.world


def collate(rows):
    words, tags = zip(*rows)
    return pad_sequence(words, True), pad_sequence(tags, True, IGNORE)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 24, padding_idx=0)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, words):
        return self.out(self.rnn(self.embed(words))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Tagging()
    sampler = SortishSampler(data, 16)
    loader = DataLoader(data, batch_size=16, sampler=sampler, collate_fn=collate)
    model = nn.parallel.DistributedDataParallel(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    world = dist.get_world_size()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for words, tags in loader:
            tokens = (tags != IGNORE).sum().float()
            dist.all_reduce(tokens)
            summed = F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=IGNORE, reduction="sum")
            optimizer.zero_grad()
            (summed * world / tokens).backward()
            optimizer.step()
        total = summed.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss per tag {(total / tokens).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
