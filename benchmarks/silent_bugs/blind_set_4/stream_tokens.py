import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class TokenStream(IterableDataset):
    """Documents of a corpus, shuffled per epoch and split over ranks and workers."""

    def __init__(self, documents, rank, world, seed=11):
        self.documents = documents
        self.rank, self.world, self.seed = rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        workers = info.num_workers if info else 1
        me = self.rank * workers + (info.id if info else 0)
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.documents), generator=g)
        for i in order[me :: self.world * workers].tolist():
            row = self.documents[i]
            yield row[:-1], row[1:]


class NextToken(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    corpus = torch.randint(0, 40, (64, 13)).cumsum(1) % 40
    stream = TokenStream(corpus, rank, world)
    loader = DataLoader(stream, batch_size=8, num_workers=1, persistent_workers=False)
    model = DistributedDataParallel(NextToken())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(4):
        stream.set_epoch(epoch)
        total, batches = 0.0, 0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, batches = total + loss.item(), batches + 1
        if rank == 0:
            print(f"epoch {epoch} loss {total / batches:.4f} over {batches} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
