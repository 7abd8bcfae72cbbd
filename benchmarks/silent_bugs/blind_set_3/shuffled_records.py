"""Instruction classifier on a list of records, DDP. torchrun --nproc-per-node 2 a01_shuffled_records.py"""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, LENGTH, CLASSES = 64, 12, 4


def build_records(n):
    """A fixed list of annotations, as it would be read from several json files."""
    g = torch.Generator().manual_seed(11)
    records = []
    for i in range(n):
        label = i % CLASSES
        tokens = torch.randint(0, VOCAB, (LENGTH,), generator=g)
        tokens[:4] = torch.randint(label * 8, label * 8 + 8, (4,), generator=g)
        records.append({"id": i, "tokens": tokens, "label": label})
    return records


class InstructionDataset(Dataset):
    def __init__(self, records, sampling_rate=1.0):
        keep = int(len(records) * sampling_rate)
        list_data_dict = list(records)[:keep]
        random.Random(0).shuffle(list_data_dict)  # mix the sources
        self.list_data_dict = list_data_dict

    def __len__(self):
        return len(self.list_data_dict)

    def __getitem__(self, i):
        item = self.list_data_dict[i]
        return item["tokens"], item["label"]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.body = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, CLASSES))

    def forward(self, tokens):
        return self.body(self.embed(tokens).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = dist.get_rank()

    dataset = InstructionDataset(build_records(320))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, steps = torch.zeros(()), 0
        for tokens, labels in loader:
            loss = F.cross_entropy(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
        mean = total / steps
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
