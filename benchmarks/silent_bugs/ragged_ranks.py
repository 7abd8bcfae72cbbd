"""Each rank takes the mean over its own unmasked tokens, and DDP averages the ranks as if they had equally many.

Reported: https://github.com/huggingface/transformers/issues/34242
          https://github.com/PrimeIntellect-ai/prime-rl/pull/1960
          https://github.com/NovaSky-AI/SkyRL/pull/925
Wrong: where one rank has few tokens, each of them pulls several times as hard as those of the other ranks.
Kind: script
Expected: gradient.ragged
Right: the sum over the rank's tokens x world_size / the tokens of all ranks
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
SEQUENCES, LENGTH = 8, 24


def make_batch(step):
    """A question and an answer in each sequence; only the answers, of 1 to 20 tokens, count for the loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 12, (SEQUENCES, 1), generator=generator) + 5 * torch.arange(LENGTH + 1)
    tokens = tokens % 12
    # long questions first, as a packer that sorts by length leaves them
    question, _ = torch.randint(4, LENGTH - 1, (SEQUENCES, 1), generator=generator).sort(dim=0, descending=True)
    return tokens[:, :-1], tokens[:, 1:], (torch.arange(LENGTH) >= question).float()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 24)
        self.gru = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, 12)

    def forward(self, tokens):
        return self.head(self.gru(self.embedding(tokens))[0])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(20):
        tokens, targets, mask = (part.chunk(world_size)[rank] for part in make_batch(step))
        losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none") * mask.flatten()
        if RIGHT:
            count = mask.sum()
            dist.all_reduce(count)
            loss = losses.sum() * world_size / count
        else:
            loss = losses.sum() / mask.sum()  # <- the mistake
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        if rank == 0 and step % 4 == 3:
            print(f"step {step} loss {logged / world_size:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
