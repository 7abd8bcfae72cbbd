"""Writes resources.csv of a training: the use of CPU, memory and each GPU of a host, once a second.

The column `device` is `cpu` for the ranks of the host (in percent of one core, with their memory), `others` for other
programs on the same cores, or the UUID of a GPU, which does not depend on CUDA_VISIBLE_DEVICES. A separate process
samples, because a thread would take time of a rank. It starts after a few seconds, so the file of a very short training
has only a header. Imports no torch.
"""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import psutil

from everyrank.measure.resources import Gpus, Processors, end_sampler, start_sampler, until_input_ends

__all__ = ["COLUMNS", "resource_log"]

COLUMNS = ("time", "host", "device", "percent", "memory_bytes")
_EVERY_SECONDS = 1.0
_DELAY_SECONDS = 3.0


@contextlib.contextmanager
def resource_log(
    path: Path | None, host: str, is_resumed: bool, delay_seconds: float = _DELAY_SECONDS
) -> Generator[None]:
    """Log the resource use of this host to `path` while the block runs; does nothing if `path` is None.

    A resumed training (`is_resumed`) appends to the existing rows. If the file cannot be written, it logs nothing.
    """
    file = _open_log(path, is_resumed) if path is not None else None
    if file is None:
        yield
        return
    samplers: list[subprocess.Popen[bytes]] = []
    timer = threading.Timer(delay_seconds, lambda: samplers.append(start_sampler(__name__, [host], file)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # the timer may be starting the process now
        for process in samplers:
            end_sampler(process)
        os.close(file)


def _open_log(path: Path, is_resumed: bool) -> int | None:
    """Open the file and write the header; None if it cannot be opened.

    It follows no symbolic link and does not wait for a pipe, because the folder may come from an untrusted source.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= 0 if is_resumed else os.O_TRUNC
    try:
        file = os.open(path, flags, 0o666)
        if os.fstat(file).st_size == 0:
            os.write(file, (",".join(COLUMNS) + "\n").encode())
    except OSError:
        return None
    return file


def main() -> None:
    """Print the rows once a second until standard input ends."""
    ended, gpus, host = until_input_ends(), Gpus(None), sys.argv[1]
    table = csv.writer(sys.stdout, lineterminator="\n")
    try:
        processors = Processors()
        while not ended.wait(_EVERY_SECONDS):
            now, used = round(time.time(), 2), processors.read()
            table.writerow((now, host, "cpu", used["cpu_percent"], int(used["memory_bytes"])))
            table.writerow((now, host, "others", used["others_percent"], ""))
            for uuid, (percent, mebibytes) in sorted(gpus.cards.items()):
                table.writerow((now, host, uuid, percent, int(mebibytes * 2**20)))
            sys.stdout.flush()
    except (psutil.Error, OSError):
        pass  # the parent process has ended, or the disk is full
    finally:
        gpus.close()


if __name__ == "__main__":
    main()
