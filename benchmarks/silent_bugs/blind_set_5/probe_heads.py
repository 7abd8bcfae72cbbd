import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(20, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        h = self.inp(x).tanh()
        for layer in self.layers:
            h = h + layer(h).tanh()
        return h


class Probe(nn.Module):
    """A pretrained encoder under a small head."""

    def __init__(self, width=32, classes=5):
        super().__init__()
        self.encoder = Encoder(width)
        self.neck = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.neck(self.encoder(x)).relu())


def shard(model, optimizer):
    """Shards the model and lets the optimizer hold the sharded parameters."""
    names = {p: n for n, p in model.named_parameters()}
    held = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    for layer in model.encoder.layers:
        fully_shard(layer)
    fully_shard(model)
    sharded = dict(model.named_parameters())
    print(f"{len(sharded)} sharded parameters for {sum(map(len, held))} in the optimizer")
    for group, part in zip(optimizer.param_groups, held):
        group["params"] = [sharded[n] for n in part]
    return model


def samples(count, g):
    x = torch.randn(count, 20, generator=g)
    return x, (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Probe()
    optimizer = torch.optim.AdamW(
        [{"params": model.neck.parameters()}, {"params": model.head.parameters(), "lr": 8e-3}], lr=1e-3
    )
    model = shard(model, optimizer)
    g = torch.Generator().manual_seed(60 + rank)
    for step in range(40):
        x, y = samples(24, g)
        loss = nn.functional.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
