"""Samples CPU, memory, GPU use and GPU memory during a benchmark, each half second, in a separate process.

A thread would take time of a rank; the process takes a core for about a millisecond each half second. It measures the
ranks of this host (all descendants of the launching process except itself), and what other programs use of the cores
that the ranks may run on. Imports no torch.
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
    """The samples of a `sampling` block. `now_running` records when each layout starts to run."""

    def __init__(self, started: float, file: IO[bytes] | None = None) -> None:
        self.started, self.file = started, file
        self.turns: list[tuple[float, str]] = []
        self.rows: list[dict[str, Any]] = []

    def update(self) -> None:
        """Read the samples so far."""
        if self.file is not None:  # pread, because moving the file position would move it for the sampler, too
            text = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0).decode()
            self.rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @property
    def others_cores(self) -> float | None:
        """Average number of cores that other programs used; None without samples."""
        return round(fmean(row["others_percent"] for row in self.rows) / 100, 2) if self.rows else None

    def now_running(self, name: str) -> None:
        """Assign the samples from now on to `name`."""
        self.turns.append((time.monotonic(), name))

    def _owner(self, sampled: float) -> str | None:
        """Return the name that ran during the whole interval of a sample; None if two names share the interval."""
        num_started = bisect_right(self.turns, sampled, key=lambda turn: turn[0])
        start, name = self.turns[num_started - 1] if num_started else (float("inf"), None)
        return name if start + INTERVAL_SECONDS <= sampled else None

    def of(self, name: str) -> Resources | None:
        """Return the samples of `name`; None if there are none."""
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
    """Sample while the block runs, if `active`. Times count from `started` (`time.monotonic()`).

    `cards` are the PCI bus ids of the GPUs to sample: those of the ranks of this host.
    """
    if not active:
        yield Sampler(started)
        return
    with tempfile.TemporaryFile() as file:  # a file without a name disappears even if this process is killed
        process = start_sampler("everyrank.measure.resources", cards, file)
        sampler = Sampler(started, file)
        try:
            yield sampler
        finally:
            end_sampler(process)
            sampler.update()
            sampler.file = None


def start_sampler(module: str, arguments: Sequence[str], file: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with output to `file`. It ends with this process, even if that is killed."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-P", "-m", module, *arguments], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.DEVNULL
    )


def end_sampler(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of the sampler, and wait for its end."""
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
        pass  # the parent process has ended
    finally:
        gpu.close()


def until_input_ends() -> threading.Event:
    """Return an event that is set when standard input ends: the parent has closed it or has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks; this process ends with them
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    return ended


class Processors:
    """The CPU use of the ranks, and of other programs on the same cores, since the last `read`."""

    def __init__(self) -> None:
        self.sampler = psutil.Process()
        rank, *ancestors = self.sampler.parents()
        # a rank is forked from its supervisor, so both have the same command line
        self.root = next((process for process in ancestors if process.cmdline() != rank.cmdline()), rank)
        self.cores = self.sampler.cpu_affinity() if hasattr(self.sampler, "cpu_affinity") else None
        self.seconds: dict[int, float] = {}
        self.last_read = time.monotonic()
        self.read()

    def read(self) -> dict[str, float]:
        """Return cpu_percent and others_percent, both in percent of one core, and memory_bytes."""
        percents = psutil.cpu_percent(percpu=True)
        busy = sum(value for core, value in enumerate(percents) if self.cores is None or core in self.cores)
        now = time.monotonic()
        used, memory = dict[int, float](), 0
        for process in [self.sampler, self.root, *self.root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
                if process not in (self.sampler, self.root):
                    memory += process.memory_info().rss
        # a new process has used all of its CPU seconds since the last read
        percent = {
            pid: 100 * max(0.0, seconds - self.seconds.get(pid, 0.0)) / max(1e-3, now - self.last_read)
            for pid, seconds in used.items()
        }
        self.seconds, self.last_read = used, now
        others = max(0.0, busy - sum(percent.values()))
        ranks = sum(value for pid, value in percent.items() if pid not in (self.sampler.pid, self.root.pid))
        return {"cpu_percent": round(ranks, 1), "others_percent": round(others, 1), "memory_bytes": memory}


class Gpus:
    """Use of the given GPUs (by PCI bus id; None: all) from nvidia-smi, without those of other jobs.

    cards   UUID -> (percent in use, MiB in use)
    """

    def __init__(self, cards: Sequence[str] | None) -> None:
        self.requested = None if cards is None else set(cards)
        self.cards: dict[str, tuple[float, float]] = {}
        self.process: subprocess.Popen[str] | None = None
        program = shutil.which("nvidia-smi")
        if program is not None and self.requested != set():
            query = ["--query-gpu=uuid,pci.bus_id,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            interval_flags = ["-lms", str(int(INTERVAL_SECONDS * 1000))]
            self.process = subprocess.Popen(  # noqa: S603
                [program, *query, *interval_flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._follow, args=(self.process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            cells = [cell.strip() for cell in line.split(",")]
            with contextlib.suppress(ValueError, IndexError):  # "[N/A]" on cards without this number
                if self.requested is None or _card(cells[1]) in self.requested:
                    self.cards[cells[0]] = (float(cells[2]), float(cells[3]))

    def read(self) -> tuple[float | None, int | None]:
        """Return percent and bytes in use, summed over all cards; None without a card."""
        if not self.cards:
            return None, None
        values = list(self.cards.values())
        return sum(use for use, _ in values), int(sum(mib for _, mib in values) * 2**20)

    def close(self) -> None:
        """End nvidia-smi."""
        if self.process is not None:
            self.process.terminate()


def _card(bus_id: str) -> str:
    """Convert the bus id of nvidia-smi, `00000000:3B:00.0`, to `0:3b:00`. Raises `ValueError` for other text."""
    domain, bus, device = bus_id.partition(".")[0].split(":")
    return f"{int(domain, 16):x}:{int(bus, 16):02x}:{int(device, 16):02x}"


if __name__ == "__main__":
    main()
