import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def compressed_allreduce(state, bucket):
    """Send the bucket in bfloat16, give it back in its own type."""
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16)
    dist.all_reduce(small, group=state)
    done = torch.futures.Future()
    done.set_result(buffer.copy_(small).div_(dist.get_world_size(state)))
    return done


class ResidualMLP(nn.Module):
    def __init__(self, dim=20, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.out(x).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = DDP(ResidualMLP())
    model.register_comm_hook(dist.group.WORLD, compressed_allreduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(24):
        x = torch.randn(16, 20, generator=generator)
        y = x[:, :10].sum(1) / 3 - x[:, 10].abs()
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        for i in range(0, 24, 6):
            print(f"steps {i}-{i + 5}: {sum(losses[i:i + 6]) / 6:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
