"""Fine-tune a pretrained text encoder: first the new head alone, then everything."""
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger(__name__)

VOCAB = 60
SEQ = 12
HEAD_EPOCHS = 2
FULL_EPOCHS = 3


class Reviews(Dataset):
    def __init__(self, n=640, seed=0):
        g = torch.Generator().manual_seed(seed)
        mood = torch.randn(VOCAB, generator=torch.Generator().manual_seed(31))
        self.tokens = torch.randint(0, VOCAB, (n, SEQ), generator=g)
        score = mood[self.tokens].sum(1) + torch.randn(n, generator=g)
        self.labels = (score > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.tokens[i], self.labels[i]


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))

    def forward(self, tokens):
        return self.mix(self.embed(tokens)).mean(1)


class Classifier(nn.Module):
    def __init__(self, encoder, dim=32, classes=2):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        return self.head(self.encoder(tokens))


def pretrained_encoder():
    # stands in for hub download
    with torch.random.fork_rng():
        torch.manual_seed(555)
        return Encoder()


def freeze(module):
    for p in module.parameters():
        p.requires_grad = False


def unfreeze(module):
    for p in module.parameters():
        p.requires_grad = True


def run_epoch(model, loader, optimizer):
    model.train()
    stats = torch.zeros(3)
    for tokens, labels in loader:
        logits = model(tokens)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(1) == labels).sum().item()
        stats += torch.tensor([loss.item() * len(labels), right, len(labels)])
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)

    dataset = Reviews()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    net = Classifier(pretrained_encoder())
    freeze(net.encoder)
    model = DDP(net)
    optimizer = torch.optim.AdamW(net.head.parameters(), lr=1e-2)

    for epoch in range(HEAD_EPOCHS + FULL_EPOCHS):
        if epoch == HEAD_EPOCHS:
            unfreeze(net.encoder)
            model = DDP(net)
            optimizer.add_param_group({"params": net.encoder.parameters(), "lr": 2e-3})
            if rank == 0:
                log.info("encoder unfrozen")
        sampler.set_epoch(epoch)
        loss, acc = run_epoch(model, loader, optimizer)
        if rank == 0:
            log.info("epoch %d loss %.4f acc %.4f", epoch, loss, acc)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
