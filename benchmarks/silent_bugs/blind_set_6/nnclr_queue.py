"""NNCLR: the positives are nearest neighbours out of a queue of earlier embeddings."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, QUEUE, DIM, CLASSES = 32, 512, 32, 10
EPOCHS = 8


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(17))
    label = torch.randint(0, CLASSES, (n,), generator=g)
    return proto[label] + 2.0 * torch.randn(n, 3, 8, 8, generator=g), label


def augment(x, g):
    flip = torch.rand(len(x), 1, 1, 1, generator=g) < 0.5
    x = torch.where(flip, x.flip(3), x)
    scale = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1, generator=g)
    return x * scale + 0.3 * torch.randn(x.shape, generator=g)


class GatherLayer(torch.autograd.Function):
    """Gathers from all processes, with the gradients of all of them."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gather(x):
    return GatherLayer.apply(x)


class NNCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
                                      nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.projector = nn.Sequential(nn.Linear(512, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, DIM))
        self.predictor = nn.Sequential(nn.Linear(DIM, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, DIM))
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, DIM), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x1, x2):
        z = self.projector(self.backbone(torch.cat([x1, x2])))
        p = self.predictor(z)
        z1, z2 = F.normalize(z, dim=1).chunk(2)
        p1, p2 = F.normalize(p, dim=1).chunk(2)
        return z1, z2, p1, p2

    @torch.no_grad()
    def dequeue_and_enqueue(self, z):
        z = gather(z)
        ptr = int(self.queue_ptr)
        self.queue[(ptr + torch.arange(len(z))) % QUEUE] = z
        self.queue_ptr[0] = (ptr + len(z)) % QUEUE

    @torch.no_grad()
    def nearest(self, z):
        return self.queue[(z @ self.queue.T).argmax(1)]


def nnclr_loss(nn_, p, temperature=0.2):
    logits = nn_ @ gather(p).T / temperature
    n = len(p)
    return F.cross_entropy(logits, dist.get_rank() * n + torch.arange(n))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    images, labels = make_images(1024, seed=1)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, shuffle=True, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = DDP(NNCLR())
    net = model.module
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=EPOCHS * len(loader))
    views = torch.Generator().manual_seed(100 + rank)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, _ in loader:
            z1, z2, p1, p2 = model(augment(x, views), augment(x, views))
            loss = (nnclr_loss(net.nearest(z1.detach()), p2) + nnclr_loss(net.nearest(z2.detach()), p1)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            net.dequeue_and_enqueue(z1.detach())
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} nnclr_loss {total[0] / total[1]:.4f}", flush=True)

    # k-NN accuracy of the backbone, once, on the first process
    if rank == 0:
        test_images, test_labels = make_images(300, seed=2)
        with torch.no_grad():
            ref = F.normalize(net.backbone(images), dim=1)
            query = F.normalize(net.backbone(test_images), dim=1)
        votes = labels[(query @ ref.T).topk(5, dim=1).indices]
        print(f"knn accuracy {(votes.mode(1).values == test_labels).float().mean():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
