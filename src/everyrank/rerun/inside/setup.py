"""Records the setup of a script: values of its variables, details of loaders, schedules and clipping.

`everyrank port` needs these to write a workload. For example, it replaces a variable with a plain value by that value.
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

from everyrank.audit.watch.source_location import user_frames

__all__ = ["ScriptValues", "save_rng", "saved_rng", "watch_setup"]

_KINDS_WITH_VALUES = {"loader", "forward", "backward", "optimizer", "schedule", "clip", "pass"}
_MAX_LETTERS = 300
_MAX_NAMES = 2000

saved_rng: list[dict[str, Any]] = []
"""The states of torch, numpy and random at the first call of `save_rng`, which a probe in the script makes."""


def save_rng() -> None:
    """Save the states of all generators at the first call."""
    if not saved_rng:
        numpy: Any = np.random.get_state(legacy=False)
        saved_rng.append(
            {
                "torch": torch.get_rng_state(),
                "numpy": [numpy["state"]["key"].tolist(), int(numpy["state"]["pos"])],
                "random": random.getstate(),
            }
        )


class ScriptValues:
    """Records the variables of the user's running frames when an expression runs for the first time."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def add(self, record: dict[str, Any]) -> None:
        """Add {name: [kind, text, identity]} to a record, for each frame of its chain.

        kind  "literal" (text is its repr), "device", "namespace" (its attributes have separate entries), or "object"
              (text is its class)
        """
        key = (record["kind"], *record["chain"][0])
        if record["kind"] in _KINDS_WITH_VALUES and key not in self.seen:
            self.seen.add(key)
            record["values"] = [_values_of(frame.f_locals) for frame in user_frames()]


def _values_of(names: dict[str, Any]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for name, value in list(names.items())[:_MAX_NAMES]:
        if name.startswith("__"):
            continue
        values[name] = _describe(value)
        if values[name][0] in ("namespace", "object"):
            for attribute, inner in list(_attributes(value).items())[:200]:
                values[f"{name}.{attribute}"] = _describe(inner)
    return values


def _describe(value: Any) -> list[Any]:
    if isinstance(value, torch.device):
        return ["device", str(value), 0]
    if _is_literal(value) and len(text := repr(value)) <= _MAX_LETTERS:
        is_device = isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu", "mps")
        return ["device" if is_device else "literal", text, 0]
    if isinstance(value, argparse.Namespace):
        return ["namespace", "", id(value)]
    value_class = type(value)
    return [
        "object",
        f"{value_class.__module__}.{value_class.__qualname__}",
        id(value),
        isinstance(value, Dataset | list | dict),
    ]


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) < 50 and all(_is_literal(each) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _attributes(value: Any) -> dict[str, Any]:
    """The public attributes of an object; {} for classes, modules and functions."""
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
    def record_schedule(schedule: Any, *args: Any, **kwargs: Any) -> None:
        init(schedule, *args, **kwargs)
        _record_schedule(watcher, schedule)

    LRScheduler.__init__ = record_schedule  # type: ignore[method-assign]
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original: Any = getattr(torch.nn.utils, name)

        @functools.wraps(original)
        def record_clip(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            bound = inspect.signature(_original).bind(*args, **kwargs).arguments
            limit: Any = bound.get("max_norm", bound.get("clip_value"))
            watcher.add_record("clip", name=_name, most=float(limit), norm_type=float(bound.get("norm_type", 2.0)))
            return _original(*args, **kwargs)

        setattr(torch.nn.utils, name, record_clip)
        setattr(torch.nn.utils.clip_grad, name, record_clip)
    set_seed = torch.manual_seed

    @functools.wraps(set_seed)
    def record_seed(seed: Any) -> Any:
        watcher.add_record("torch_seed", value=int(seed))
        return set_seed(seed)

    torch.manual_seed = record_seed


def _record_schedule(watcher: Any, schedule: Any) -> None:
    """Record a schedule that is constructed, and each of its later steps."""
    if any(each is schedule for each in watcher.kept_alive):
        return
    watcher.kept_alive.append(schedule)
    inner_schedules = [id(each) for each in getattr(schedule, "_schedulers", [])]
    watcher.add_record(
        "schedule",
        id=id(schedule),
        name=type(schedule).__name__,
        parts=inner_schedules,
        of=id(schedule.optimizer),
    )
    step = schedule.step

    @functools.wraps(step)
    def record_step(*args: Any, **kwargs: Any) -> Any:
        watcher.add_record("schedule_step", id=id(schedule), mode=getattr(schedule, "mode", ""))
        return step(*args, **kwargs)

    schedule.step = record_step


def _length(value: Any) -> int:
    """The length of a dataset or loader; -1 if it has none, or its own `__len__` raises an error."""
    try:
        return len(value)
    except Exception:
        return -1


def _watch_loaders(watcher: Any) -> None:
    """Record the details of each loader that a workload file needs."""
    loader_class: Any = DataLoader
    init = loader_class.__init__

    @functools.wraps(init)
    def record_loader(loader: Any, *args: Any, **kwargs: Any) -> None:
        seed = torch.initial_seed()
        init(loader, *args, **kwargs)
        sampler = loader.sampler
        with watcher.session.quiet():
            length, batches = _length(loader.dataset), _length(loader)
        watcher.add_record(
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

    loader_class.__init__ = record_loader
