"""CLIP loss over the batch of all ranks, with a gather that carries gradients and a learned temperature."""
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(x):
    return torch.cat(torch.distributed.nn.all_gather(x))


class CLIP(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, dim))
        self.text = nn.EmbeddingBag(60, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.logit_scale.exp()


def clip_loss(image, text, scale):
    """Every rank takes the rows of its own samples; the labels are shifted by the rank."""
    n, rank = len(image), dist.get_rank()
    all_image, all_text = gather(image), gather(text)
    labels = torch.arange(n) + rank * n
    per_image = scale * image @ all_text.T
    per_text = scale * text @ all_image.T
    return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def pairs(n=288):
    g = torch.Generator().manual_seed(15)
    words = torch.randint(0, 60, (n, 5), generator=g)
    table = torch.randn(60, 40, generator=g)
    return TensorDataset(table[words].mean(1) + 0.1 * torch.randn(n, 40, generator=g), words)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    data = pairs()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=18, sampler=sampler, drop_last=True)
    model = DDP(CLIP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = clip_loss(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, 4.6)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {shown.item() / dist.get_world_size():.4f} scale {model.module.logit_scale.exp().item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
