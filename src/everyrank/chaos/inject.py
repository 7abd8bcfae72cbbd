"""Injects a fault in a rank before an update. Imports torch late, because the launching process does not need it.

The faults are not simulated: signals, a full disk, a memory limit, flipped bits of a tensor.
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
    from torch import nn

__all__ = ["Injection", "Injections"]

_LEFT_BYTES = 60_000  # free bytes on the full disk, for lines of the log
_SLOW_UPDATES, _SLOW_SECONDS = 5, 0.2
_FREE_MEMORY_BYTES = 1 << 28


@dataclass(frozen=True)
class Injection:
    """Injects one fault in one rank before one update; a callable for `TrainOptions.before_update`.

    journal    file to which a line of JSON is appended at the injection: time (seconds since 1970), rank, process
    launcher   process id of the launching process
    until      the update before which the full disk is emptied again
    """

    fault: str
    update: int
    rank: int
    journal: str
    launcher: int = 0
    until: int = 0

    def __call__(self, prepared: Any, number: int) -> None:
        """Inject the fault at its update, and end it at its last update."""
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
            _INJECTORS[_SAME_INJECTOR.get(self.fault, self.fault)](self, prepared)

    @property
    def _ballast(self) -> Path:
        return Path(self.journal).with_name("disk") / "ballast"


@dataclass(frozen=True)
class Injections:
    """Several faults, each at its own update."""

    injections: tuple[Injection, ...]

    def __call__(self, prepared: Any, number: int) -> None:
        """Call each injection."""
        for injection in self.injections:
            injection(prepared, number)


# campaign.py corrupts the checkpoint after the ranks have been killed
_SAME_INJECTOR = {"cut-checkpoint": "kill-all", "flipped-checkpoint": "kill-all"}


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
    file_system = os.statvfs(path.parent)
    with path.open("wb") as file:
        file.write(bytes(max(0, file_system.f_bavail * file_system.f_frsize - _LEFT_BYTES)))


def _drop_link(_: Injection, __: Any) -> None:
    _run("ip", "link", "set", LINK, "down")


def _delay_link(_: Injection, __: Any) -> None:
    _run(*SLOW_LINK)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)  # noqa: S603


def _nan_gradient(_: Injection, prepared: Any) -> None:
    """Replace the gradient of the output of the first trained module by NaN; collectives spread it to other ranks."""
    import torch
    from torch.utils._pytree import tree_leaves

    def corrupt(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not tensors or not handles:  # an evaluation, or the second module
            return
        for handle in handles:
            handle.remove()
        handles.clear()
        tensors[0].register_hook(lambda gradient: torch.full_like(gradient, float("nan")))

    modules: list[nn.Module] = list(prepared.model.modules())
    trained_modules = [
        module for module in modules if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]
    handles = [module.register_forward_hook(corrupt) for module in trained_modules]


def _flip_bit(injection: Injection, prepared: Any) -> None:
    """Flip a bit in the middle of the first element of a parameter, selected by the number of the update."""
    import torch

    from everyrank.parallel.mesh import local_tensor

    parameters = [local_tensor(parameter).detach() for parameter in prepared.trainable.parameters]
    parameters = [
        parameter
        for parameter in parameters
        if parameter.numel() and parameter.is_floating_point() and parameter.is_contiguous()
    ]
    values = parameters[injection.update % len(parameters)].view(-1)
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    bits[0] ^= 1 << (6 * values.element_size())


def _mismatched_collective(_: Injection, prepared: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(3, device=prepared.world.device), group=prepared.world.group)


def _out_of_memory(_injection: Injection, _prepared: Any) -> None:
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError):  # there is already a lower hard limit
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _FREE_MEMORY_BYTES, hard_limit))
    torch.ones(4 * _FREE_MEMORY_BYTES, dtype=torch.uint8)


_INJECTORS: dict[str, Callable[[Injection, Any], None]] = {
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
