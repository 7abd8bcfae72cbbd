"""Writes the events of a process as lines of JSON, and samples of gradients as files of arrays.

`everyrank.audit.evidence` reads the files when the processes have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from everyrank.audit.events import Event, HookFailed, Stopped, Unchecked

__all__ = ["HOOKS", "Recorder", "Settings", "all_leaves", "checksum", "harmless", "local", "local_bytes", "tensors"]

_WATCH_INTERVAL = 50
ENVIRONMENT = "EVERYRANK_AUDIT"
ACCELERATE_ON_CPU = "ACCELERATE_USE_CPU"  # Accelerate's own variable, which its launcher sets, too


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the hooks, passed as JSON in an environment variable.

    folder             folder of the event files
    updates            number of updates to record; the script is stopped after twice as many
    batches            number of batches of each epoch to run before its last one; 0: all
    epochs             number of epochs of a training loader to run; 0: all
    devices            number of pretended CUDA devices
    records_functions  record every torch function and collective (not with --watch)
    replay             number of updates to replay in one process
    keep_files         do not redirect the files that the script writes
    main               the script
    shim               a folder of modules to import first
    """

    folder: str
    updates: int = 12
    batches: int = 4
    epochs: int = 2
    devices: int = 0
    records_functions: bool = True
    replay: int = 0
    keep_files: bool = False
    shim: str = ""
    main: str = ""

    @classmethod
    def read(cls, text: str) -> Settings:
        """The settings from the JSON of `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """The settings as JSON, for the environment."""
        return json.dumps(dataclasses.asdict(self))


class Recorder:
    """Counts updates and backwards, and writes the events of this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.rank = int(os.environ.get("RANK", "-1"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.update = 0  # optimizer steps done
        self.micro = 0  # backwards since the last of them
        self.phase = "script"  # the code that calls collectives: the script, a forward, a backward...
        self.is_done = False
        self.num_collectives = 0  # collectives since the first update began
        self.calls_by_rpc = False
        self._muted = threading.local()
        self._failed_tasks: set[str] = set()  # hooks that have raised
        self._last_failed_update = -1  # the last update in which one has
        self._count = 0
        self._pid = 0
        self._file: Any = None

    @property
    def is_muted(self) -> bool:
        """Whether events are ignored now, because a hook is running or the update is skipped."""
        return getattr(self._muted, "depth", 0) > 0 or self.is_skipped

    @property
    def is_skipped(self) -> bool:
        """Whether --watch skips this update: after the first updates it records only every 50th."""
        is_late = self.update >= 2 * self.settings.updates
        return is_late and not self.settings.records_functions and self.update % _WATCH_INTERVAL != 0

    @contextlib.contextmanager
    def muted(self) -> Generator[None]:
        """Ignore events of this thread within the block. Other threads of the script are recorded."""
        self._muted.depth = getattr(self._muted, "depth", 0) + 1
        try:
            yield
        finally:
            self._muted.depth -= 1

    @contextlib.contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Set the phase of collectives within the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def write(self, event: Event) -> None:
        """Write an event as a line of JSON. Loader workers are forked, so each process has a file of its own."""
        if self.is_muted and not isinstance(event, Stopped):  # under RPC another thread may be inside a muted block
            return
        self._count += 1
        position = {
            "update": self.update,
            "micro": self.micro,
            "rank": self.rank,
            "count": self._count,
            "time": time.time(),
        }
        row = {"kind": type(event).__name__, **vars(event), **position}
        with contextlib.suppress(OSError):  # a full disk, or a process that outlives the audit and its folder
            if os.getpid() != self._pid:
                path = self.folder / f"pid{os.getpid()}.jsonl"
                self._file, self._pid = _real_open(path, "a", buffering=1, encoding="utf-8"), os.getpid()
            self._file.write(json.dumps(row, default=vars) + "\n")  # default: LossTerm, ReduceResult

    def hook_failed(self, task: str, error: Exception) -> None:
        """Report that a hook has raised. The script continues."""
        with contextlib.suppress(Exception):
            if self.update != self._last_failed_update:
                self._last_failed_update = self.update
                self.write(HookFailed())
            if task in self._failed_tasks:
                return
            self._failed_tasks.add(task)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            self.write(Unchecked(message=f"{task}: a hook of everyrank failed ({reason}); the script continued"))

    def arrays(self, name: str, content: dict[str, np.ndarray]) -> None:
        """Write arrays by name to a file, atomically."""
        partial = self.folder / f".{name}.{os.getpid()}.npz"
        with _real_open(partial, "wb") as file:
            renamed: Any = {key.replace("/", "|"): value for key, value in content.items()}
            np.savez(file, **renamed)
        os.replace(partial, self.folder / f"{name}.npz")  # noqa: PTH105


_real_open = open

HOOKS: list[Any] = []
"""Every method that `harmless` protects."""


def harmless(task: str, default: Callable[[], Any] = lambda: None) -> Callable[[Any], Any]:
    """Decorate a method of a hook so that its errors never reach the script.

    task     what cannot be checked if the method fails, for the report
    default  returns the method's result in that case

    The object of the method needs a `recorder`. Torch calls these methods inside the script, so an error in one of them
    would end the training.
    """

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def protected(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return protected.__wrapped__(self, *args, **kwargs)
            except Exception as error:
                self.recorder.hook_failed(task, error)
                return default()

        HOOKS.append(protected)
        return protected

    return decorate


def tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """All tensors in nested lists, tuples, dicts and dataclasses."""
    import torch

    for leaf in all_leaves(value, depth):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def all_leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """All leaves of nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from all_leaves(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from all_leaves(inner, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < 3:
        # an attribute may not be set yet, and with slots there is no dict of attributes
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        yield from all_leaves(vars(value) if hasattr(value, "__dict__") else fields, depth + 1)
    else:
        yield value


def local(tensor: Any) -> Any:
    """The local part of a tensor on this rank, dense."""
    tensor = tensor.detach()
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (shard.to_dense() if shard.is_sparse else shard).resolve_conj().resolve_neg()


def checksum(tensor: Any) -> int:
    """The CRC-32 of the bytes of a tensor's local part."""
    return zlib.crc32(local_bytes(tensor).data)


def local_bytes(tensor: Any) -> np.ndarray:
    """The bytes of a tensor's local part; none if its memory is freed."""
    import torch

    shard = local(tensor)
    if not shard.numel() or not shard.untyped_storage().nbytes():  # fully_shard frees gathered parameters
        return np.empty(0, np.uint8)
    # view(uint8) needs a stride of 1, and a column of a single row is contiguous with any stride
    flat = shard.cpu().contiguous().as_strided((shard.numel(),), (1,))
    return flat.view(torch.uint8).numpy()
