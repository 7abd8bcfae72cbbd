"""CPU, memory, GPU use and GPU memory while a benchmark runs, sampled each half second by a process of its own.

A thread of a rank would take that rank's time; a process takes a core's for about a millisecond each half second. It
watches the ranks of this host: all that come from who started them, but for itself; and what other programs take of
the cores that the ranks may run on. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Generator, Sequence
from statistics import fmean
from typing import IO, Any

import psutil

from everyrank.record import Resources

__all__ = ["Gpus", "Processors", "Sampler", "end_sampler", "sampling", "start_sampler", "until_input_ends"]

INTERVAL_SECONDS = 0.5


class Sampler:
    """Samples between `sampling`'s begin and end; who was running when is told by `now_running`."""

    def __init__(self, started: float, file: IO[bytes] | None = None) -> None:
        self.started, self.file = started, file
        self.turns: list[tuple[float, str]] = []
        self.rows: list[dict[str, Any]] = []

    def look(self) -> None:
        """Read what has been sampled until now."""
        if self.file is not None:  # its place in the file is where the other process writes: it stays there
            text = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0).decode()
            self.rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def others_cores(self) -> float | None:
        """How many cores other programs took, on average over all samples; None without one."""
        return round(fmean(row["others_percent"] for row in self.rows) / 100, 2) if self.rows else None

    def now_running(self, name: str) -> None:
        """From now on samples belong to `name`."""
        self.turns.append((time.monotonic(), name))

    def _owner(self, sampled: float) -> str | None:
        """Whose turn it was in all of the half second before, of which a sample tells; None where two share it."""
        begun = bisect_right(self.turns, sampled, key=lambda turn: turn[0])
        start, name = self.turns[begun - 1] if begun else (float("inf"), None)
        return name if start + INTERVAL_SECONDS <= sampled else None

    def of(self, name: str) -> Resources | None:
        """The samples that belong to `name`; None without one."""
        rows = [row for row in self.rows if self._owner(row["time"]) == name]
        if not rows:
            return None
        has_gpu = all(row["gpu_percent"] is not None for row in rows)
        return Resources(
            interval_seconds=INTERVAL_SECONDS,
            seconds=[round(row["time"] - self.started, 2) for row in rows],
            cpu_percent=[row["cpu_percent"] for row in rows],
            memory_bytes=[row["memory_bytes"] for row in rows],
            others_percent=[row["others_percent"] for row in rows],
            gpu_percent=[row["gpu_percent"] for row in rows] if has_gpu else [],
            gpu_memory_bytes=[row["gpu_memory_bytes"] for row in rows] if has_gpu else [],
        )


@contextlib.contextmanager
def sampling(started: float, active: bool, cards: Sequence[str] = ()) -> Generator[Sampler]:
    """Sample while the block runs, where `active`; `started` is what the times count from (`time.monotonic()`).

    Of GPUs those `cards` are looked at, which the ranks of this host compute on, by their place on the PCI bus.
    """
    if not active:
        yield Sampler(started)
        return
    with tempfile.TemporaryFile() as file:  # it has no name: nothing is left however this process ends
        process = start_sampler("everyrank.measure.resources", cards, file)
        sampler = Sampler(started, file)
        try:
            yield sampler
        finally:
            end_sampler(process)
            sampler.look()
            sampler.file = None


def start_sampler(module: str, words: Sequence[str], file: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """`python -m module words`, which writes to `file`, and ends when this process does, however that ends."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-m", module, *words], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.DEVNULL
    )


def end_sampler(process: subprocess.Popen[bytes]) -> None:
    """Close what it reads from, and wait until it has written what it had."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Print one line of JSON each half second until standard input ends."""
    ended, gpu = until_input_ends(), Gpus(sys.argv[1:])
    try:
        processors = Processors()
        while not ended.wait(INTERVAL_SECONDS):
            gpu_percent, gpu_memory = gpu.read()
            row = {"time": time.monotonic(), **processors.read()}
            row |= {"gpu_percent": gpu_percent, "gpu_memory_bytes": gpu_memory}
            print(json.dumps(row), flush=True)
    except psutil.Error:
        pass  # who started the ranks has gone, and so will they
    finally:
        gpu.close()


def until_input_ends() -> threading.Event:
    """Set when standard input ends: who has started this process is gone, or wants it to be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks; with them this ends, too
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    return ended


class Processors:
    """What the ranks use, and what is used beside them of the cores they may run on, since the last look."""

    def __init__(self) -> None:
        self.own = psutil.Process()
        rank, *above = self.own.parents()
        # a rank of ours is forked from its supervisor
        self.root = next((process for process in above if process.cmdline() != rank.cmdline()), rank)
        self.cores = self.own.cpu_affinity() if hasattr(self.own, "cpu_affinity") else None
        self.seconds: dict[int, float] = {}
        self.looked = time.monotonic()
        self.read()

    def read(self) -> dict[str, float]:
        """cpu_percent and others_percent, each of one core, and memory_bytes."""
        percents = psutil.cpu_percent(percpu=True)
        busy = sum(value for core, value in enumerate(percents) if self.cores is None or core in self.cores)
        now = time.monotonic()
        used, memory = dict[int, float](), 0
        for process in [self.own, self.root, *self.root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
                if process not in (self.own, self.root):
                    memory += process.memory_info().rss
        # one that is new since has used all of its seconds since
        percent = {
            pid: 100 * max(0.0, seconds - self.seconds.get(pid, 0.0)) / max(1e-3, now - self.looked)
            for pid, seconds in used.items()
        }
        self.seconds, self.looked = used, now
        others = max(0.0, busy - sum(percent.values()))
        ranks = sum(value for pid, value in percent.items() if pid not in (self.own.pid, self.root.pid))
        return {"cpu_percent": round(ranks, 1), "others_percent": round(others, 1), "memory_bytes": memory}


class Gpus:
    """What nvidia-smi says of these cards (by their place on the PCI bus), and not of those of other people's jobs.

    cards   UUID -> (percent in use, MiB in use); of None: all that are there
    """

    def __init__(self, cards: Sequence[str] | None) -> None:
        self.asked = None if cards is None else set(cards)
        self.cards: dict[str, tuple[float, float]] = {}
        self.process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi")
        if program is not None and self.asked != set():
            query = ["--query-gpu=uuid,pci.bus_id,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            every = ["-lms", str(int(INTERVAL_SECONDS * 1000))]
            self.process = subprocess.Popen(  # noqa: S603
                [program, *query, *every], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._follow, args=(self.process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            cells = [cell.strip() for cell in line.split(",")]
            with contextlib.suppress(ValueError, IndexError):  # "[N/A]" on cards that do not tell
                if self.asked is None or _card(cells[1]) in self.asked:
                    self.cards[cells[0]] = (float(cells[2]), float(cells[3]))

    def read(self) -> tuple[float | None, int | None]:
        """Percent and bytes in use, added up over all cards; None where none tells."""
        if not self.cards:
            return None, None
        values = list(self.cards.values())
        return sum(use for use, _ in values), int(sum(mib for _, mib in values) * 2**20)

    def close(self) -> None:
        """Ask no more."""
        if self.process is not None:
            self.process.terminate()


def _card(bus_id: str) -> str:
    """`00000000:3B:00.0`, as nvidia-smi writes it -> `0:3b:00`. Raises `ValueError` for anything else."""
    domain, bus, device = bus_id.partition(".")[0].split(":")
    return f"{int(domain, 16):x}:{int(bus, 16):02x}:{int(device, 16):02x}"


if __name__ == "__main__":
    main()
