import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

PAD = 0


class Decoder(nn.Module):
    def __init__(self, vocab=36, width=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(depth))
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        for layer in self.layers:
            h = h + layer(h)[0]
        return self.out(h.flatten(0, 1))


def micro_batch(g):
    length = int(torch.randint(4, 20, (1,), generator=g))
    start = torch.randint(1, 36, (3, 1), generator=g)
    ids = 1 + (start + 2 * torch.arange(length + 1)) % 35
    ids[torch.rand(3, generator=g) < 0.3, length // 2 :] = PAD
    return ids


def main(updates=20, accumulate=3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Decoder()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(rank)
    for update in range(updates):
        window = [micro_batch(g) for _ in range(accumulate)]
        tokens = torch.tensor(float(sum((ids[:, 1:] != PAD).sum() for ids in window)))
        dist.all_reduce(tokens)
        loss_sum = torch.zeros(())
        for k, ids in enumerate(window):
            model.set_requires_gradient_sync(k == accumulate - 1)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
            (loss * dist.get_world_size() / tokens).backward()
            loss_sum += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        if rank == 0 and update % 5 == 4:
            print(f"{update + 1}: {loss_sum / tokens:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
