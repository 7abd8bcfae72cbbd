"""Image-text contrastive training; embeddings of all ranks are gathered with their gradients."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH, WORDS, VOCAB = 64, 8, 60


class AllGather(torch.autograd.Function):
    """Concatenates the tensors of all ranks; the backward pass sums what every rank wants of our part."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(40)
    to_image, to_words = torch.randn(6, 36, generator=fixed), torch.randn(6, VOCAB, generator=fixed)
    hidden = torch.randn(n, 6, generator=g)
    image = (hidden @ to_image).view(n, 1, 6, 6) + 0.5 * torch.randn(n, 1, 6, 6, generator=g)
    text = torch.multinomial((hidden @ to_words).softmax(-1), WORDS, replacement=True, generator=g)
    return image, text


class TwoTowers(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, dim))
        self.words = nn.Embedding(VOCAB, 48)
        self.text = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, image, text):
        return (F.normalize(self.image(image), dim=-1), F.normalize(self.text(self.words(text).mean(1)), dim=-1),
                self.logit_scale.exp())


def clip_loss(image, text, scale):
    # every rank computes the loss of the whole batch
    image, text = AllGather.apply(image), AllGather.apply(text)
    logits = scale * image @ text.T
    target = torch.arange(len(logits))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


@torch.no_grad()
def recall_at_1(model, image, text, rank, world):
    zi, zt, _ = model(image, text)
    hits = ((zi[rank::world] @ zt.T).argmax(1) == torch.arange(len(image))[rank::world]).sum().float()
    dist.all_reduce(hits)
    return hits.item() / len(image)


def main(seed=8):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    train = TensorDataset(*pairs(1024, 1))
    val_image, val_text = pairs(101, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    torch.manual_seed(seed)
    model = DDP(TwoTowers())
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        total = 0.0
        for image, text in loader:
            loss = clip_loss(*model(image, text))
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
            total += loss.item()
        recall = recall_at_1(model.module, val_image, val_text, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(loader):.5f} R@1 {recall:.4f} scale {model.module.logit_scale.exp():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
