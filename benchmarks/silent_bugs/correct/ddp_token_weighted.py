"""A language model with masked targets: each rank's sum of losses, over the mean number of tokens of a rank."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def get_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, 20, (16, 1), generator=generator) + 7 * torch.arange(25)) % 20
    lengths, _ = torch.randint(1, 25, (16, 1), generator=generator).sort(0)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(24) >= lengths, -100)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(20, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 20)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=5e-3)
    for step in range(24):
        tokens, targets = (part.chunk(world_size)[rank] for part in get_batch(step))
        mean_count = (targets != -100).sum().float()
        dist.all_reduce(mean_count)
        mean_count /= world_size
        logits = ddp(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        (loss / mean_count).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logged = loss.detach() / mean_count / world_size
        dist.all_reduce(logged)
        if rank == 0 and step % 6 == 5:
            print(f"step {step} loss {logged:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
