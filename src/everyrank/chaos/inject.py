"""Inside a rank: one fault at one update. Torch is imported when it strikes: who starts the ranks has none.

What happens is what happens for real: signals, a file system without room, a limit of memory, bits of a tensor.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyrank.chaos.faults import FAULTS
from everyrank.chaos.two_hosts import LINK, SLOW_LINK

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Injection", "Injections"]

_LEFT_BYTES = 60_000  # on a full disk, for the lines of a log
_SLOW_UPDATES, _SLOW_SECONDS = 5, 0.2
_MEMORY__LEFT_BYTES = 1 << 28


@dataclass(frozen=True)
class Injection:
    """A fault of this name, in this rank, before the update of this number; what `TrainOptions.before_update` takes.

    journal    a line of JSON is written here when it strikes: time (seconds since 1970), rank, process
    launcher   the process that started the ranks
    until      the number of the update before which a disk has room again
    """

    fault: str
    update: int
    rank: int
    journal: str
    launcher: int = 0
    until: int = 0

    def __call__(self, prepared: Any, number: int) -> None:
        """Strike, where it is time."""
        if prepared.world.rank != self.rank and not FAULTS[self.fault].all_ranks:
            return
        if self.fault == "slow-rank" and self.update < number < self.update + _SLOW_UPDATES:
            time.sleep(_SLOW_SECONDS)
        if self.fault == "link-delayed" and number == self.update + _SLOW_UPDATES:
            _run("tc", "qdisc", "del", "dev", LINK, "root")
        if self.fault == "full-disk" and number == self.until:
            self._ballast.unlink(missing_ok=True)
        if number == self.update:
            with Path(self.journal).open("a") as journal:
                fields = {"fault": self.fault, "update": number, "rank": prepared.world.rank}
                row = fields | {"time": time.time(), "process": os.getpid()}
                journal.write(json.dumps(row) + "\n")
            _STRIKES[_STRIKE_AS.get(self.fault, self.fault)](self, prepared)

    @property
    def _ballast(self) -> Path:
        return Path(self.journal).with_name("disk") / "ballast"


@dataclass(frozen=True)
class Injections:
    """Several faults, each at its own update."""

    each: tuple[Injection, ...]

    def __call__(self, prepared: Any, number: int) -> None:
        """Strike with each whose time it is."""
        for injection in self.each:
            injection(prepared, number)


_STRIKE_AS = {"cut-checkpoint": "kill-all", "flipped-checkpoint": "kill-all"}  # what is spoilt is spoilt afterwards


def _kill(_: Injection, __: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_launcher(injection: Injection, _: Any) -> None:
    os.kill(injection.launcher, signal.SIGKILL)


def _stop(_: Injection, __: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(_: Injection, __: Any) -> None:
    time.sleep(_SLOW_SECONDS)


def _fill_disk(injection: Injection, _: Any) -> None:
    path = injection._ballast  # pyright: ignore[reportPrivateUsage]
    free = os.statvfs(path.parent)
    with path.open("wb") as file:
        file.write(bytes(max(0, free.f_bavail * free.f_frsize - _LEFT_BYTES)))


def _drop_link(_: Injection, __: Any) -> None:
    _run("ip", "link", "set", LINK, "down")


def _delay_link(_: Injection, __: Any) -> None:
    _run(*SLOW_LINK)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)  # noqa: S603


def _nan_gradient(_: Injection, prepared: Any) -> None:
    """The gradient of the first module's output is NaN on this rank: what it makes of it travels to the others."""
    import torch

    modules: list[nn.Module] = list(prepared.model.modules())
    first = next(module for module in modules if next(module.parameters(recurse=False), None) is not None)

    def spoil(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        handle.remove()
        output.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))

    handle = first.register_forward_hook(spoil)


def _flip_bit(injection: Injection, prepared: Any) -> None:
    """A bit in the middle of the first element of one parameter; which one, the number of the update decides."""
    import torch

    from everyrank.parallel.mesh import local_tensor

    parameters = [local_tensor(parameter).detach() for parameter in prepared.trainable.parameters]
    parameters = [
        parameter
        for parameter in parameters
        if parameter.numel() and parameter.is_floating_point() and parameter.is_contiguous()
    ]
    chosen = parameters[injection.update % len(parameters)].view(-1)
    bits = chosen.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[chosen.element_size()])
    bits[0] ^= 1 << (6 * chosen.element_size())


def _mismatched_collective(_: Injection, prepared: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3, device=prepared.world.device), group=prepared.world.group)


def _out_of_memory(_own: Injection, _prepared: Any) -> None:
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError):  # a hard limit that is lower does as well
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY__LEFT_BYTES, hard))
    torch.ones(4 * _MEMORY__LEFT_BYTES, dtype=torch.uint8)


_STRIKES: dict[str, Callable[[Injection, Any], None]] = {
    "kill-rank": _kill,
    "kill-all": _kill,
    "kill-launcher": _kill_launcher,
    "stop-rank": _stop,
    "pause-rank": _stop,
    "slow-rank": _slow,
    "full-disk": _fill_disk,
    "nan-gradient": _nan_gradient,
    "flipped-bit": _flip_bit,
    "mismatched-collective": _mismatched_collective,
    "out-of-memory": _out_of_memory,
    "link-dropped": _drop_link,
    "link-delayed": _delay_link,
}
