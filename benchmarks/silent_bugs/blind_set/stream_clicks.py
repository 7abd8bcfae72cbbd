import argparse
import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def write_logs(folder, files=8, rows=120):
    """Fake click logs: one json per line, as they come from the tracker."""
    g = torch.Generator().manual_seed(7)
    w = torch.randn(12, generator=g)
    os.makedirs(folder, exist_ok=True)
    for f in range(files):
        with open(os.path.join(folder, f"clicks-{f:03d}.jsonl"), "w") as out:
            for r in range(rows):
                x = torch.randn(12, generator=g)
                p = torch.sigmoid(x @ w)
                label = int(torch.rand((), generator=g) < p)
                out.write(json.dumps({"id": f * rows + r, "x": x.tolist(), "y": label}) + "\n")


class ClickStream(IterableDataset):
    def __init__(self, folder, rank, world_size, seed=0):
        self.paths = sorted(os.path.join(folder, p) for p in os.listdir(folder))
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def read(self, path):
        with open(path) as handle:
            for line in handle:
                row = json.loads(line)
                yield torch.tensor(row["x"]), torch.tensor(float(row["y"]))

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.paths), generator=g).tolist()
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for k in order[self.rank * workers + worker :: self.world_size * workers]:
            yield from self.read(self.paths[k])


def build_model(hidden):
    return nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--logs", default=None)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=40)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    folder = [args.logs]
    if args.logs is None:
        if rank == 0:
            folder = [tempfile.mkdtemp(prefix="clicks")]
            write_logs(folder[0])
        dist.broadcast_object_list(folder, src=0)

    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(args.hidden))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()

    stream = ClickStream(folder[0], rank, world)
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers)

    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: bce {total[0] / total[1]:.4f} over {int(total[1])} clicks")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
