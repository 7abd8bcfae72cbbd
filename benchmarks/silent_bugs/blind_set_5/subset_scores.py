import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SUBSETS = ("digits", "letters", "signs")


class SmallVision(nn.Module):
    def __init__(self, answers=5):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.question = nn.Embedding(len(SUBSETS), 16)
        self.head = nn.Linear(8 * 4 * 4 + 16, answers)

    def forward(self, image, subset):
        return self.head(torch.cat([self.image(image), self.question(subset)], 1))


def make(count, seed):
    g = torch.Generator().manual_seed(seed)
    subset = torch.randint(0, len(SUBSETS), (count,), generator=g)
    answer = torch.randint(0, 5, (count,), generator=g)
    image = torch.randn(count, 1, 8, 8, generator=g) * (0.5 + subset).view(-1, 1, 1, 1)
    for n in range(count):
        a = int(answer[n])
        image[n, 0, a : a + 3, 2 : 5] += 1.5
    return image, subset, answer


class Scores:
    """Sums of every metric of every subset."""

    def __init__(self):
        self.sums = {}

    def add(self, name, value):
        self.sums.setdefault(name, torch.zeros(2))
        self.sums[name] += torch.tensor([float(value), 1.0])

    def gather(self):
        result = {}
        for name in sorted(self.sums):
            total = self.sums[name].clone()
            dist.all_reduce(total)
            result[name] = (total[0] / total[1]).item()
        return result


@torch.no_grad()
def evaluate(model, data, rank, world):
    scores = Scores()
    image, subset, answer = (d[rank::world] for d in data)
    logits = model(image, subset)
    for n in range(len(image)):
        name = SUBSETS[subset[n]]
        scores.add(f"{name}/correct", logits[n].argmax() == answer[n])
        scores.add(f"{name}/nll", F.cross_entropy(logits[n : n + 1], answer[n : n + 1]))
    return scores.gather()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(SmallVision())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, test = make(256, 1), make(90, 2)
    image, subset, answer = (d[rank::world] for d in train)
    for epoch in range(3):
        g = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(len(image), generator=g).split(16):
            loss = F.cross_entropy(model(image[rows], subset[rows]), answer[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result = evaluate(model.module, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}", {k: round(v, 4) for k, v in sorted(result.items())})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
