"""Records what a script sets up: the values that its names have, details of loaders, schedules and clipping.

A tool that writes the training in another form needs them: a name with a plain value needs none of the lines before it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import random
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from everyrank.audit.watch.place import frames

__all__ = ["ScriptValues", "keep_rng", "kept_rng", "watch_setup"]

_KINDS = {"loader", "forward", "backward", "optimizer", "schedule", "clip", "pass"}
_MOST_LETTERS = 300
_MOST_NAMES = 2000

kept_rng: list[dict[str, Any]] = []
"""The states of torch, numpy and random where a probe in the script asked for them first."""


def keep_rng() -> None:
    """Keep the states of all generators, the first time."""
    if not kept_rng:
        numpy: Any = np.random.get_state(legacy=False)
        kept_rng.append(
            {
                "torch": torch.get_rng_state(),
                "numpy": [numpy["state"]["key"].tolist(), int(numpy["state"]["pos"])],
                "random": random.getstate(),
            }
        )


class ScriptValues:
    """The names of the user's running frames with their values, the first time that an expression runs."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def add(self, record: dict[str, Any]) -> None:
        """Add to a record, for each frame of its chain, {name: [kind, text, identity]}.

        kind  "literal" (text is its repr), "device", "namespace" (its attributes have entries of their own), or
              "object" (text is its class)
        """
        key = (record["kind"], *record["chain"][0])
        if record["kind"] in _KINDS and key not in self.seen:
            self.seen.add(key)
            record["values"] = [_values(frame.f_locals) for frame in frames()]


def _values(names: dict[str, Any]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for name, value in list(names.items())[:_MOST_NAMES]:
        if name.startswith("__"):
            continue
        values[name] = _described(value)
        if values[name][0] in ("namespace", "object"):
            for attribute, inner in list(_attributes(value).items())[:200]:
                values[f"{name}.{attribute}"] = _described(inner)
    return values


def _described(value: Any) -> list[Any]:
    if isinstance(value, torch.device):
        return ["device", str(value), 0]
    if _is_literal(value) and len(text := repr(value)) <= _MOST_LETTERS:
        is_device = isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu", "mps")
        return ["device" if is_device else "literal", text, 0]
    if isinstance(value, argparse.Namespace):
        return ["namespace", "", id(value)]
    kind = type(value)
    return ["object", f"{kind.__module__}.{kind.__qualname__}", id(value), isinstance(value, Dataset | list | dict)]


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) < 50 and all(_is_literal(each) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object of the user's own; of a module only plain ones."""
    if (
        isinstance(value, type)
        or inspect.ismodule(value)
        or (callable(value) and not isinstance(value, torch.nn.Module))
    ):
        return {}
    return {name: each for name, each in getattr(value, "__dict__", {}).items() if not name.startswith("_")}


def watch_setup(watcher: Any) -> None:
    """Record loaders' details, schedules with their steps, clipping, and seeds."""
    _watch_loaders(watcher)
    init = LRScheduler.__init__

    @functools.wraps(init)
    def scheduled(schedule: Any, *args: Any, **kwargs: Any) -> None:
        init(schedule, *args, **kwargs)
        _note_schedule(watcher, schedule)

    LRScheduler.__init__ = scheduled  # type: ignore[method-assign]
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original: Any = getattr(torch.nn.utils, name)

        @functools.wraps(original)
        def clipped(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            bound = inspect.signature(_original).bind(*args, **kwargs).arguments
            most: Any = bound.get("max_norm", bound.get("clip_value"))
            watcher.note("clip", name=_name, most=float(most), norm_type=float(bound.get("norm_type", 2.0)))
            return _original(*args, **kwargs)

        setattr(torch.nn.utils, name, clipped)
        setattr(torch.nn.utils.clip_grad, name, clipped)
    seed = torch.manual_seed

    @functools.wraps(seed)
    def seeded(value: Any) -> Any:
        watcher.note("torch_seed", value=int(value))
        return seed(value)

    torch.manual_seed = seeded


def _note_schedule(watcher: Any, schedule: Any) -> None:
    """Record a schedule that was made, and each of its later steps."""
    if any(each is schedule for each in watcher.kept_alive):
        return
    watcher.kept_alive.append(schedule)
    parts = [id(each) for each in getattr(schedule, "_schedulers", [])]
    watcher.note("schedule", id=id(schedule), name=type(schedule).__name__, parts=parts, of=id(schedule.optimizer))
    step = schedule.step

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        watcher.note("schedule_step", id=id(schedule), mode=getattr(schedule, "mode", ""))
        return step(*args, **kwargs)

    schedule.step = stepped


def _watch_loaders(watcher: Any) -> None:
    """Record what the file of a workload needs of each loader."""
    kind: Any = DataLoader
    init = kind.__init__

    @functools.wraps(init)
    def made(loader: Any, *args: Any, **kwargs: Any) -> None:
        seed = torch.initial_seed()
        init(loader, *args, **kwargs)
        sampler = loader.sampler
        with watcher.session.quiet():
            length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1
            try:
                batches = len(loader)
            except TypeError:
                batches = -1
        watcher.note(
            "loader_details",
            id=id(loader),
            batch_size=loader.batch_size,
            sampler=type(sampler).__name__,
            replacement=bool(getattr(sampler, "replacement", False)),
            num_samples=int(getattr(sampler, "num_samples", length) or 0),
            plain_batches=type(loader.batch_sampler) is BatchSampler,
            default_collate=loader.collate_fn is default_collate,
            length=length,
            batches=batches,
            drop_last=bool(loader.drop_last),
            seed=seed,
        )

    kind.__init__ = made
