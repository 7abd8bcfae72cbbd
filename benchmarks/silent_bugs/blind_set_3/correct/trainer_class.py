"""A Trainer with arguments and callbacks; accumulates, resumes exactly in the middle of an epoch."""
import os
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class TrainingArguments:
    output_dir: str
    num_train_epochs: int = 3
    per_device_batch: int = 8
    gradient_accumulation_steps: int = 2
    learning_rate: float = 5e-3
    max_steps: int = -1
    seed: int = 42


class LogCallback:
    def on_epoch_end(self, trainer, epoch, loss):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, step {trainer.global_step}, loss {loss:.4f}")


class Trainer:
    def __init__(self, model_init, args, dataset, callbacks=()):
        self.args, self.callbacks, self.global_step = args, callbacks, 0
        torch.manual_seed(args.seed)
        self.model = DDP(model_init())
        self.sampler = DistributedSampler(dataset, seed=args.seed)
        self.loader = DataLoader(dataset, batch_size=args.per_device_batch, sampler=self.sampler)
        self.updates_per_epoch = len(self.loader) // args.gradient_accumulation_steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)
        total = self.updates_per_epoch * args.num_train_epochs
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: max(0.0, 1 - s / total))

    def save(self):
        if dist.get_rank() == 0:
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(),
                     "scheduler": self.scheduler.state_dict(), "global_step": self.global_step}
            torch.save(state, os.path.join(self.args.output_dir, "state.pt"))
        dist.barrier()

    def load(self):
        state = torch.load(os.path.join(self.args.output_dir, "state.pt"), weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.global_step = state["global_step"]

    def train(self, resume=False):
        args = self.args
        if resume:
            self.load()
        first_epoch, done = divmod(self.global_step, self.updates_per_epoch)
        for epoch in range(first_epoch, args.num_train_epochs):
            self.sampler.set_epoch(epoch)
            skip = done * args.gradient_accumulation_steps if epoch == first_epoch else 0
            for i, (x, y) in enumerate(self.loader):
                if i < skip:
                    continue
                loss = F.cross_entropy(self.model(x), y)
                (loss / args.gradient_accumulation_steps).backward()
                if (i + 1) % args.gradient_accumulation_steps == 0:
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                    self.global_step += 1
                    if self.global_step == args.max_steps:
                        return self.save()
            for callback in self.callbacks:
                callback.on_epoch_end(self, epoch, loss.item())


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 9, generator=g)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long() * 2 + (x[:, 2] > 0).long())
    init = lambda: nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 4))
    Trainer(init, TrainingArguments(folder[0], max_steps=11), data, [LogCallback()]).train()
    Trainer(init, TrainingArguments(folder[0]), data, [LogCallback()]).train(resume=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
