"""Mixture of experts; the balance loss enters through the gate weights, the token loss is normalised globally."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DIM, EXPERTS, CLASSES, COEFF = 16, 4, 6, 0.3


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Identity for the weights; sends main_loss_backward_scale as the gradient of the auxiliary loss."""
    main_loss_backward_scale = 1.0

    @staticmethod
    def forward(ctx, weights, aux_loss):
        ctx.save_for_backward(aux_loss)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (aux_loss,) = ctx.saved_tensors
        return grad, torch.ones_like(aux_loss) * MoEAuxLossAutoScaler.main_loss_backward_scale


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x, total_tokens):
        probs = self.proj(x).softmax(-1)
        weights, index = probs.max(-1)
        load = torch.bincount(index, minlength=EXPERTS).float()
        dist.all_reduce(load)  # tokens per expert over all ranks
        aux_loss = COEFF * EXPERTS * (load / total_tokens * probs.sum(0) / total_tokens).sum()
        return MoEAuxLossAutoScaler.apply(weights, aux_loss), index


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM)) for _ in range(EXPERTS))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x, total_tokens):
        weights, index = self.gate(x, total_tokens)
        y = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(x + weights[:, None] * y[torch.arange(len(x)), index])


def tokens(step, rank):
    """Every rank has another number of tokens at every step."""
    g = torch.Generator().manual_seed(100 * step + rank)
    n = int(torch.randint(24, 56, (1,), generator=g))
    x = torch.randn(n, DIM, generator=g)
    return x, (x[:, :CLASSES] + 0.3 * x[:, 6:6 + CLASSES]).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(MoE())
    MoEAuxLossAutoScaler.main_loss_backward_scale = float(world)  # against DDP's average
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(20):
        x, y = tokens(step, rank)
        total = torch.tensor(float(len(x)))
        dist.all_reduce(total)
        token_loss = F.cross_entropy(model(x, total.item()), y, reduction="sum")
        optimizer.zero_grad()
        (token_loss * world / total).backward()  # DDP divides by the world size
        optimizer.step()
        if step % 5 == 4:
            shown = token_loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {(shown / total).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
