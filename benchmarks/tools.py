"""Training loops of everyrank, Accelerate, Fabric and the Trainer, for overhead.py to compare.

Each loop follows the documentation of its tool. All loops are generators that yield after one or more updates.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from everyrank import parse_layout
from everyrank.data import all_updates, updates_per_epoch
from everyrank.loop import run_updates
from everyrank.strategies import prepare
from everyrank.world import World
from everyrank.world.collectives import sum_over_ranks

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning", "trainer": "transformers"}
KEPT_LOSSES = 20


def everyrank_loop(job: Any, losses: list[float], world: World, layout: str) -> Iterator[None]:
    """Run the loop of `everyrank train`, without its progress bar and its log."""
    dataset = job.train_data()
    prepared = prepare(job, parse_layout(layout), world)
    updates = all_updates(10**6, updates_per_epoch(len(dataset), job.global_batch))
    for local_loss in run_updates(prepared, dataset, itertools.islice(updates, 100_000)):
        if len(losses) < KEPT_LOSSES:
            total, count = (sum_over_ranks(local_loss, world) if world.size > 1 else local_loss).tolist()
            losses.append(total / count)
        yield


def accelerate_loop(job: Any, losses: list[float]) -> Iterator[None]:
    """Run the loop that the documentation of Accelerate shows."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(job.seed)
    model = job.model().train()
    optimizer = job.optimizer(model)
    loader = DataLoader(job.train_data(), batch_size=job.global_batch // dist.get_world_size(), shuffle=True)
    schedule = job.schedule(optimizer) if job.schedule else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if schedule is not None:
        schedule = accelerator.prepare(schedule)
    while True:
        for value, target in loader:
            optimizer.zero_grad()
            total, count = job.loss(call_model(model, value), target)
            loss = total / count
            accelerator.backward(loss)
            if job.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            record_loss(losses, loss)
            yield


def fabric_loop(job: Any, losses: list[float]) -> Iterator[None]:
    """Run the loop that the documentation of Fabric shows."""
    from lightning.fabric import Fabric

    size = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
    fabric.launch()
    torch.manual_seed(job.seed)
    model = job.model().train()
    optimizer = job.optimizer(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    loader = DataLoader(job.train_data(), batch_size=job.global_batch // dist.get_world_size(), shuffle=True)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    while True:
        for value, target in loader:
            optimizer.zero_grad()
            total, count = job.loss(call_model(model, value), target)
            loss = total / count
            fabric.backward(loss)
            if job.clip_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            record_loss(losses, loss)
            yield


class WithLoss(nn.Module):
    """A model in the form that the Trainer requires: it takes the target and returns the loss."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.model, self.loss = job.model(), job.loss

    def forward(self, value: Any, target: Any) -> dict[str, Any]:
        total, count = self.loss(call_model(self.model, value), target)
        return {"loss": total / count}


def trainer_loop(job: Any, losses: list[float], steps: int) -> Iterator[None]:
    """Run the Trainer and yield after each `steps` updates.

    The Trainer has no loop to step through. It runs in a thread, which a callback stops after each `steps` updates.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    may_yield, may_train = threading.Semaphore(0), threading.Semaphore(0)

    class PauseTrainer(TrainerCallback):
        num_updates = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.num_updates += 1
            if self.num_updates % steps == 0:
                may_yield.release()
                may_train.acquire()

    class LossTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            record_loss(losses, loss)
            return loss

    def collate(samples: list[Any]) -> dict[str, Any]:
        value, target = torch.utils.data.default_collate(samples)
        return {"value": value, "target": target}

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=job.global_batch // dist.get_world_size(),
        max_steps=100_000,
        max_grad_norm=job.clip_norm or 0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if dist.get_world_size() > 1 else None,
        seed=job.seed,
    )
    torch.manual_seed(job.seed)
    model = WithLoss(job)
    optimizer = job.optimizer(model.model)
    schedule = job.schedule(optimizer) if job.schedule else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = LossTrainer(
        model=model,
        args=arguments,
        train_dataset=job.train_data(),
        data_collator=collate,
        optimizers=(optimizer, schedule),
        callbacks=[PauseTrainer()],
    )

    def train() -> None:
        torch.set_num_threads(1)
        may_train.acquire()
        trainer.train()

    threading.Thread(target=train, daemon=True).start()
    while True:
        may_train.release()
        may_yield.acquire()
        yield


def call_model(model: nn.Module, value: Any) -> Any:
    """Return the output of `model`; `value` is one argument, or a dict of keyword arguments."""
    return model(**value) if isinstance(value, dict) else model(value)


def record_loss(losses: list[float], loss: torch.Tensor) -> None:
    """Append the loss of one of the first updates."""
    if len(losses) < KEPT_LOSSES:
        losses.append(float(loss.detach()))
