import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--accum-grad", type=int, default=2)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=6)
    p.add_argument("--lr", type=float, default=0.05)
    return p.parse_args()


class FrameClassifier(nn.Module):
    def __init__(self, mel=20, phones=9):
        super().__init__()
        self.conv = nn.Conv1d(mel, 24, 3, padding=1)
        self.head = nn.Conv1d(24, phones, 1)

    def forward(self, frames):
        return self.head(torch.relu(self.conv(frames)))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(3)
        mel = torch.randn(120, 20, 15)
        phones = mel[:, :9].argmax(1)
        data = TensorDataset(mel, phones)
        self.sampler = DistributedSampler(data, shuffle=True, seed=3)
        self.loader = DataLoader(data, args.batch_size, sampler=self.sampler, drop_last=True)
        self.model = DistributedDataParallel(FrameClassifier())
        self.optim = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        accum_grad = self.args.accum_grad
        last = 0.0
        for batch_idx, (mel, phones) in enumerate(self.loader):
            skip = accum_grad > 1 and (batch_idx + 1) % accum_grad != 0
            with self.model.no_sync() if skip else nullcontext():
                loss = nn.functional.cross_entropy(self.model(mel), phones) / accum_grad
                loss.backward()
            if (batch_idx + 1) % accum_grad == 0:
                self.optim.step()
                self.optim.zero_grad()
            last = loss.item() * accum_grad
        if self.rank == 0:
            print(f"epoch {epoch}: loss {last:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    args = parse()
    trainer = Trainer(args)
    for epoch in range(args.epochs):
        trainer.train_epoch(epoch)
    dist.destroy_process_group()
