"""The same training by everyrank and by other tools, each as its own documentation writes it; generators, too."""

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
KEPT = 20  # losses


def everyrank_loop(job: Any, losses: list[float], world: World, layout: str) -> Iterator[None]:
    """The loop that `everyrank train` runs, without its progress bar and its log, which adds up losses now and then."""
    dataset = job.train_data()
    prepared = prepare(job, parse_layout(layout), world)
    updates = all_updates(10**6, updates_per_epoch(len(dataset), job.global_batch))
    shares = run_updates(prepared, dataset, itertools.islice(updates, 100_000))
    for share in shares:
        if len(losses) < KEPT:
            total, count = (sum_over_ranks(share, world) if world.size > 1 else share).tolist()
            losses.append(total / count)
        yield


def accelerate_loop(job: Any, losses: list[float]) -> Iterator[None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(job.seed)
    model = job.model().train()
    optimizer = job.optimizer(model)
    loader = DataLoader(job.train_data(), batch_size=job.global_batch // size(), shuffle=True)
    schedule = job.schedule(optimizer) if job.schedule else None
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if schedule is not None:
        schedule = accelerator.prepare(schedule)
    while True:
        for value, target in loader:
            optimizer.zero_grad()
            total, count = job.loss(call(model, value), target)
            loss = total / count
            accelerator.backward(loss)
            if job.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            keep(losses, loss)
            yield


def fabric_loop(job: Any, losses: list[float]) -> Iterator[None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=size(), strategy="ddp" if size() > 1 else "auto")
    fabric.launch()
    torch.manual_seed(job.seed)
    model = job.model().train()
    optimizer = job.optimizer(model)
    schedule = job.schedule(optimizer) if job.schedule else None
    loader = DataLoader(job.train_data(), batch_size=job.global_batch // size(), shuffle=True)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    while True:
        for value, target in loader:
            optimizer.zero_grad()
            total, count = job.loss(call(model, value), target)
            loss = total / count
            fabric.backward(loss)
            if job.clip_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=job.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            keep(losses, loss)
            yield


class WithLoss(nn.Module):
    """What the Trainer wants: a model that takes the target and returns the loss."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.model, self.loss = job.model(), job.loss

    def forward(self, value: Any, target: Any) -> dict[str, Any]:
        total, count = self.loss(call(self.model, value), target)
        return {"loss": total / count}


def trainer_loop(job: Any, losses: list[float], steps: int) -> Iterator[None]:
    """The Trainer keeps its loop to itself: it runs in a thread that is let go on for `steps` updates at a time."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ours, theirs = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(TrainerCallback):
        done = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.done += 1
            if self.done % steps == 0:
                ours.release()
                theirs.acquire()

    class Keeping(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            keep(losses, loss)
            return loss

    def collate(samples: list[Any]) -> dict[str, Any]:
        value, target = torch.utils.data.default_collate(samples)
        return {"value": value, "target": target}

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=job.global_batch // size(),
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
        ddp_backend="gloo" if size() > 1 else None,
        seed=job.seed,
    )
    torch.manual_seed(job.seed)
    model = WithLoss(job)
    optimizer = job.optimizer(model.model)
    schedule = job.schedule(optimizer) if job.schedule else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = Keeping(
        model=model,
        args=arguments,
        train_dataset=job.train_data(),
        data_collator=collate,
        optimizers=(optimizer, schedule),
        callbacks=[Turns()],
    )

    def train() -> None:
        torch.set_num_threads(1)
        theirs.acquire()
        trainer.train()

    threading.Thread(target=train, daemon=True).start()
    while True:
        theirs.release()
        ours.acquire()
        yield


def call(model: nn.Module, value: Any) -> Any:
    return model(**value) if isinstance(value, dict) else model(value)


def keep(losses: list[float], loss: torch.Tensor) -> None:
    if len(losses) < KEPT:
        losses.append(float(loss.detach()))


def size() -> int:
    return dist.get_world_size()
