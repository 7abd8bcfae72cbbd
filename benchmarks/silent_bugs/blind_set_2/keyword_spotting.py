# Toy keyword spotting from a streamed "audio" source.
import math
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, DataLoader, get_worker_info

CFG = dict(clips=128, sr=256, classes=4, batch=8, workers=2, epochs=2, lr=2e-3)


def synth(i):
    g = torch.Generator().manual_seed(1000 + i)
    label = i % CFG["classes"]
    t = torch.arange(CFG["sr"]) / CFG["sr"]
    phase = torch.rand(1, generator=g) * 2 * math.pi
    wav = torch.sin(2 * math.pi * (8 + 10 * label) * t + phase)
    return wav + 0.3 * torch.randn(CFG["sr"], generator=g), label


class ClipStream(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world = n, rank, world
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        info = get_worker_info()
        workers = info.num_workers if info else 1
        me = info.id if info else 0
        for i in order[self.rank * workers + me::self.world * workers]:
            yield synth(i)


class SpotNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 12, 33, stride=8)
        self.head = nn.Linear(12, CFG["classes"])

    def forward(self, wav):
        h = torch.relu(self.conv(wav.unsqueeze(1)))
        return self.head(h.amax(-1))


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stream = ClipStream(CFG["clips"], rank, world)
    loader = DataLoader(stream, batch_size=CFG["batch"], num_workers=CFG["workers"])
    net = DistributedDataParallel(SpotNet())
    opt = torch.optim.Adam(net.parameters(), lr=CFG["lr"])
    for epoch in range(CFG["epochs"]):
        stream.epoch = epoch
        stats = torch.zeros(2)
        for wav, label in loader:
            opt.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(net(wav), label)
            loss.backward()
            opt.step()
            stats += torch.tensor([loss.item() * len(label), len(label)])
        dist.all_reduce(stats)
        if rank == 0:
            print("epoch", epoch, "loss", round((stats[0] / stats[1]).item(), 4), "clips", int(stats[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
