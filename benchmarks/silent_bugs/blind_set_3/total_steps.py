"""Text classification with linear warm-up and decay (BERT recipe), gradient accumulation of two."""
import argparse
import logging

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logger = logging.getLogger(__name__)


def linear_schedule(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total - step) / max(1, total - warmup))
    return LambdaLR(optimizer, factor)


class Encoder(nn.Module):
    def __init__(self, vocab=80, dim=32, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.out(self.layer(self.embed(ids)).mean(1))


def features(n=384):
    g = torch.Generator().manual_seed(13)
    y = torch.randint(0, 3, (n,), generator=g)
    ids = torch.randint(0, 80, (n, 10), generator=g)
    ids[:, 2] = y * 20 + torch.randint(0, 20, (n,), generator=g)
    return TensorDataset(ids, y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--warmup_proportion", type=float, default=0.1)
    cfg = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(42)

    train_data = features()
    sampler = DistributedSampler(train_data)
    loader = DataLoader(train_data, sampler=sampler, batch_size=cfg.batch_size)
    num_train_optimization_steps = int(len(loader) / cfg.gradient_accumulation_steps) * cfg.train_epochs

    model = nn.parallel.DistributedDataParallel(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, weight_decay=0.01)
    scheduler = linear_schedule(optimizer, int(cfg.warmup_proportion * num_train_optimization_steps), num_train_optimization_steps)
    loss_fct = nn.CrossEntropyLoss()
    global_step = 0
    for epoch in range(cfg.train_epochs):
        sampler.set_epoch(epoch)
        for step, (ids, y) in enumerate(loader):
            loss = loss_fct(model(ids), y) / cfg.gradient_accumulation_steps
            loss.backward()
            if (step + 1) % cfg.gradient_accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                global_step += 1
        if dist.get_rank() == 0:
            logger.info("epoch %d step %d loss %.4f lr %.6f", epoch, global_step, loss.item() * 2, scheduler.get_last_lr()[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
