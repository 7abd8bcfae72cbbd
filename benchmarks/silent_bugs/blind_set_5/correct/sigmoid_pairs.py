import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Pass(torch.autograd.Function):
    """Gives a tensor to the next rank and takes that of the previous one; gradients go the other way."""

    @staticmethod
    def forward(ctx, x):
        return exchange(x, 1)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, -1)


def exchange(x, step):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(x)
    work = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x.contiguous(), (rank + step) % world),
        dist.P2POp(dist.irecv, out, (rank - step) % world),
    ])
    for w in work:
        w.wait()
    return out


class Towers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, dim))
        self.text = nn.Sequential(nn.EmbeddingBag(50, 32), nn.Linear(32, dim))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.6)), nn.Parameter(torch.tensor(-3.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.scale.exp(), self.bias


def sigmoid_loss(image, text, scale, bias):
    n, world = len(image), dist.get_world_size()
    total = 0
    for hop in range(world):
        sign = 2 * torch.eye(n) - 1 if hop == 0 else -torch.ones(n, n)
        total = total - F.logsigmoid(sign * (scale * image @ text.t() + bias)).sum() / n
        if hop + 1 < world:
            text = Pass.apply(text)
    return total


def captions(count, g):
    text = torch.randint(0, 50, (count, 4), generator=g)
    return F.one_hot(text, 50).float().sum(1)[:, :24] + 0.1 * torch.randn(count, 24, generator=g), text


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Towers())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(30 + dist.get_rank())
    for step in range(30):
        loss = sigmoid_loss(*model(*captions(12, g)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()
