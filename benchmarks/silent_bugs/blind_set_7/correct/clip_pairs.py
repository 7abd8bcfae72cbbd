"""Two-tower contrastive training (CLIP style), negatives from all processes."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IMAGE, TEXT, EMBED = 48, 24, 16
BATCH, EPOCHS = 32, 10


def make_pairs(n, seed):
    shared = torch.Generator().manual_seed(90)
    a, b = torch.randn(10, IMAGE, generator=shared), torch.randn(10, TEXT, generator=shared)
    g = torch.Generator().manual_seed(seed)
    latent = torch.randn(n, 10, generator=g)
    image = torch.tanh(latent @ a / 2) + 0.3 * torch.randn(n, IMAGE, generator=g)
    text = torch.tanh(latent @ b / 2) + 0.3 * torch.randn(n, TEXT, generator=g)
    return TensorDataset(image, text)


class GatherLayer(torch.autograd.Function):
    """all_gather whose gradient goes back to the process that the rows came from."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def tower(inputs):
    return nn.Sequential(nn.Linear(inputs, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, EMBED))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.textual = tower(IMAGE), tower(TEXT)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=1), F.normalize(self.textual(text), dim=1), self.logit_scale.exp()


def clip_loss(image, text, scale):
    all_image, all_text = GatherLayer.apply(image), GatherLayer.apply(text)
    labels = torch.arange(len(image)) + len(image) * dist.get_rank()
    per_image = scale * image @ all_text.t()
    per_text = scale * text @ all_image.t()
    return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


@torch.no_grad()
def recall_at_1(model, pairs):
    model.eval()
    image, text, _ = model.module(*pairs.tensors)
    model.train()
    return ((image @ text.t()).argmax(1) == torch.arange(len(image))).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    train, val = make_pairs(1024, seed=1), make_pairs(150, seed=2)
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = DDP(TwoTower())
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for image, text in loader:
            loss = clip_loss(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  loss {total.item() / world / len(loader):.4f}  R@1 {recall_at_1(model, val):.3f}"
                  f"  scale {model.module.logit_scale.exp().item():.2f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
