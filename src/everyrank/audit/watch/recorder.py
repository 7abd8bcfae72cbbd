"""What is written down inside a rank: one line of JSON for each thing that happened, and gradients as small samples.

Nothing is judged here. The files are read when the processes are gone, by `everyrank.audit.rules`.
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

__all__ = ["HOOKS", "Recorder", "Settings", "all_leaves", "checksum", "harmless", "local", "tensors"]

_SOMETIMES = 50
ENVIRONMENT = "EVERYRANK_AUDIT"
BY_RPC = "RPC: what"  # how that begins which is said of a script over RPC
ACCELERATE_ON_CPU = "ACCELERATE_USE_CPU"  # Accelerate's own variable, which its launcher sets, too


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the watching process is told; it travels as JSON in an environment variable.

    folder         where to write
    updates        the script is stopped after so many optimizer steps
    batches        of each epoch of a loader, before its last one
    epochs         of a training loader
    devices        pretended CUDA devices; 0: none are pretended
    modes          whether every torch function and collective is looked at (--watch: no)
    replay         updates that are kept, and run once more in one process
    keep_files     whether what the script writes goes where it says
    main           the script
    shim           a folder of modules that come before all others
    """

    folder: str
    updates: int = 12
    batches: int = 4
    epochs: int = 2
    devices: int = 0
    modes: bool = True
    replay: int = 0
    keep_files: bool = False
    shim: str = ""
    main: str = ""

    @classmethod
    def read(cls, text: str) -> Settings:
        """What `written` gave."""
        return cls(**json.loads(text))

    def written(self) -> str:
        """As JSON, for the environment."""
        return json.dumps(dataclasses.asdict(self))


class Recorder:
    """Where the training stands, and the files of this process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.rank = int(os.environ.get("RANK", "-1"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.update = 0  # optimizer steps done
        self.micro = 0  # backwards since the last of them
        self.phase = "script"  # whose collectives these are: the script's, or those of a forward, a backward...
        self.is_done = False
        self.num_sent = 0  # collectives since the first update began
        self.calls_by_rpc = False
        self._muted = threading.local()
        self._failed: set[str] = set()  # hooks of ours that have raised
        self._failed_in = -1  # the update in which one did last
        self._count = 0
        self._pid = 0
        self._file: Any = None

    @property
    def is_muted(self) -> bool:
        """Whether what happens now is our own doing, or not looked at."""
        return getattr(self._muted, "depth", 0) > 0 or self.is_skipped

    @property
    def is_skipped(self) -> bool:
        """Under --watch every 50th update is looked at, after the first."""
        is_late = self.update >= 2 * self.settings.updates
        return is_late and not self.settings.modes and self.update % _SOMETIMES != 0

    @contextlib.contextmanager
    def muted(self) -> Generator[None]:
        """While this thread computes something of ours; the script's other threads are recorded meanwhile."""
        self._muted.depth = getattr(self._muted, "depth", 0) + 1
        try:
            yield
        finally:
            self._muted.depth -= 1

    @contextlib.contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Collectives in this block belong to `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def write(self, event: Event) -> None:
        """Write an event as a line of JSON. Loader workers are forked, so each process has a file of its own."""
        if self.is_muted and not isinstance(event, Stopped):  # under RPC another thread may be inside a muted block
            return
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._file = _real_open(self.folder / f"pid{self._pid}.jsonl", "a", buffering=1, encoding="utf-8")
        self._count += 1
        now = {"update": self.update, "micro": self.micro, "rank": self.rank, "count": self._count, "time": time.time()}
        row = {"kind": type(event).__name__, **vars(event), **now}
        with contextlib.suppress(OSError):  # a full disk
            self._file.write(json.dumps(row, default=vars) + "\n")  # default: LossTerm, ReduceResult

    def hook_failed(self, what: str, error: Exception) -> None:
        """The script goes on; the report says what was not checked, and why."""
        with contextlib.suppress(Exception):
            if self.update != self._failed_in:
                self._failed_in = self.update
                self.write(HookFailed())
            if what in self._failed:
                return
            self._failed.add(what)
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            self.write(Unchecked(message=f"{what}: everyrank could not look at it ({why}); the script went on"))

    def arrays(self, name: str, content: dict[str, np.ndarray]) -> None:
        """Write arrays by name, whole or not at all."""
        partial = self.folder / f".{name}.{os.getpid()}.npz"
        with _real_open(partial, "wb") as file:
            renamed: Any = {key.replace("/", "|"): value for key, value in content.items()}
            np.savez(file, **renamed)
        os.replace(partial, self.folder / f"{name}.npz")  # noqa: PTH105


_real_open = open

HOOKS: list[Any] = []
"""Every method that `harmless` protects."""


def harmless(what: str, default: Callable[[], Any] = lambda: None) -> Callable[[Any], Any]:
    """A method that looks on, and whose own errors never reach the script.

    what     what is not checked when the method fails, for the report
    default  makes what it returns then

    Its object has a `recorder`. Torch calls these methods in the middle of the script: an error of ours there would end
    a training that runs.
    """

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def protected(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return protected.__wrapped__(self, *args, **kwargs)
            except Exception as error:
                self.recorder.hook_failed(what, error)
                return default()

        HOOKS.append(protected)
        return protected

    return decorate


def tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """Every tensor in lists, tuples, dicts and dataclasses."""
    import torch

    for leaf in all_leaves(value, depth):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def all_leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """What is in lists, tuples, dicts and dataclasses, and in these in turn."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from all_leaves(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from all_leaves(inner, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < 3:
        yield from all_leaves(vars(value), depth + 1)
    else:
        yield value


def local(tensor: Any) -> Any:
    """What this rank holds of it, with the zeros that a sparse gradient leaves out."""
    tensor = tensor.detach()
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.to_dense() if held.is_sparse else held


def checksum(tensor: Any) -> int:
    """Of the bytes that this rank holds."""
    import torch

    held = local(tensor)
    if not held.numel() or not held.untyped_storage().nbytes():  # fully_shard frees what it has gathered
        return 0
    # a column of a single row is contiguous, whatever its stride: bytes want a stride of 1
    flat = held.cpu().contiguous().as_strided((held.numel(),), (1,))
    return zlib.crc32(flat.view(torch.uint8).numpy())
