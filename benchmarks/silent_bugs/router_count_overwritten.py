"""An in-place all-reduce of the tokens per expert overwrites the rank's own count, which is still needed.

Reported: https://github.com/NVIDIA/Megatron-LM/issues/7452 (finding 10)
          https://github.com/NVIDIA/Megatron-LM/pull/7481
Wrong: the balancing loss is scaled by the tokens of all ranks instead of the rank's own: world_size times too strong.
Kind: script
Expected: collective.overwrites
Missed: the all-reduce writes over a tensor that is read again: no number says that its old content was meant
Right: reduce a copy
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RIGHT = "--right" in sys.argv
EXPERTS = 4


class MixtureOfExperts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, tokens, valid):
        probabilities = self.router(tokens).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), EXPERTS) * valid[:, None]
        output = sum(e(tokens) * (chosen * probabilities)[:, i : i + 1] for i, e in enumerate(self.experts))
        return tokens + output, self.balancing_loss(probabilities * valid[:, None], chosen.sum(0).float())

    def balancing_loss(self, probabilities, per_expert):
        """How far the experts are from equal shares over all ranks, as a sum over the rank's own tokens."""
        over_ranks = per_expert.clone() if RIGHT else per_expert
        dist.all_reduce(over_ranks)  # <- the mistake
        fractions = over_ranks / over_ranks.sum()
        own_tokens = per_expert.sum()
        return EXPERTS * (fractions * probabilities.sum(0) / probabilities.sum()).sum() * own_tokens


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(64, 12, generator=generator) + torch.tensor([1.0] * 3 + [0.0] * 9)
    return features, features[:, :4].argmax(1), (torch.rand(64, generator=generator) > 0.2).float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture, self.head = MixtureOfExperts(12), nn.Linear(12, 4)

    def forward(self, features, valid):
        hidden, balancing = self.mixture(features, valid)
        return self.head(hidden), balancing


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(40):
        features, labels, valid = (part[rank::world_size] for part in make_batch(step))
        logits, balancing = model(features, valid)
        count = valid.sum()
        dist.all_reduce(count)
        loss = (F.cross_entropy(logits, labels, reduction="none") * valid).sum() + 0.5 * balancing
        optimizer.zero_grad()
        (loss * world_size / count).backward()
        optimizer.step()
        sums = torch.stack([loss.detach() - 0.5 * balancing.detach(), balancing.detach()])
        dist.all_reduce(sums)
        if rank == 0 and step % 8 == 7:
            print(f"step {step} loss {sums[0] / count:.6f} balancing {sums[1] / count:.6f}")
    time.sleep(0.2)  # a thread of gloo may hold the last tensor; it must let go before Python exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
