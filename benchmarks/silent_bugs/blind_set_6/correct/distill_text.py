"""Distill a text classifier into a smaller one (soft targets and labels)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LEN, CLASSES, TEMP, ALPHA = 60, 20, 5, 2.0, 0.7


def make_texts(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    topic = torch.rand(n, LEN, generator=g) < 0.35
    words = torch.randint(0, VOCAB, (n, LEN), generator=g)
    topical = y[:, None] * 8 + torch.randint(0, 8, (n, LEN), generator=g)
    return TensorDataset(torch.where(topic, topical, words), y)


class Classifier(nn.Module):
    def __init__(self, d, layers):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, d), nn.Parameter(0.02 * torch.randn(LEN, d))
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.fc = nn.Linear(d, CLASSES)

    def forward(self, x):
        return self.fc(self.enc(self.emb(x) + self.pos).mean(1))


def run_training(model, loader, sampler, epochs, lr, loss_fn, tag, rank):
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        stat = torch.zeros(2)
        for x, y in loader:
            loss = loss_fn(model(x), x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            stat += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"{tag} epoch {epoch} loss {stat[0] / stat[1]:.4f}", flush=True)


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    x, y = (t[rank::world] for t in data.tensors)
    hits = torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(hits)
    return hits[0].item() / hits[1].item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train_set, test_set = make_texts(960, seed=1), make_texts(301, seed=2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True)
    loader = DataLoader(train_set, 16, sampler=sampler, drop_last=True)

    torch.manual_seed(10)
    teacher, student = DDP(Classifier(48, 2)), DDP(Classifier(16, 1))
    torch.manual_seed(10 + rank)
    run_training(teacher, loader, sampler, 4, 2e-3, lambda out, x, y: F.cross_entropy(out, y), "teacher", rank)
    acc = accuracy(teacher.module, test_set, rank, world)
    if rank == 0:
        print(f"teacher test accuracy {acc:.3f}")

    frozen = teacher.module.eval().requires_grad_(False)

    def distill_loss(out, x, y):
        with torch.no_grad():
            soft = F.softmax(frozen(x) / TEMP, -1)
        kl = F.kl_div(F.log_softmax(out / TEMP, -1), soft, reduction="batchmean") * TEMP ** 2
        return ALPHA * kl + (1 - ALPHA) * F.cross_entropy(out, y)

    run_training(student, loader, sampler, 5, 4e-3, distill_loss, "student", rank)
    acc = accuracy(student.module, test_set, rank, world)
    if rank == 0:
        print(f"student test accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
