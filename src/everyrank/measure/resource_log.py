"""resources.csv of a training: CPU, memory and each GPU of a host, in a row each, once a second.

`device` is cpu (what the ranks of the host use, in percent of one core, and their memory), others (what other programs
take of the same cores), or the UUID of a GPU, which stays its own where CUDA_VISIBLE_DEVICES renumbers them. As in a
bench a process of its own samples, not a thread that takes a rank's time; a training that ends in a few seconds starts
none, and has a header alone. Imports no torch.
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
_BEGIN_SECONDS = 3.0


@contextlib.contextmanager
def resource_log(path: Path | None, host: str, goes_on: bool, begin_seconds: float = _BEGIN_SECONDS) -> Generator[None]:
    """Log the resource use of this host to `path` while the block runs; does nothing if `path` is None.

    A training that goes on (`goes_on`) adds to the rows that are there. A file that cannot be written is no reason to
    stop a training.
    """
    file = _opened(path, goes_on) if path is not None else None
    if file is None:
        yield
        return
    started: list[subprocess.Popen[bytes]] = []
    timer = threading.Timer(begin_seconds, lambda: started.append(start_sampler(__name__, [host], file)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting the process just now
        for process in started:
            end_sampler(process)
        os.close(file)


def _opened(path: Path, goes_on: bool) -> int | None:
    """The file, with a header; None where there is something else by that name.

    A link is not followed, and a pipe not waited for: in a folder from elsewhere either may lead anywhere.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= 0 if goes_on else os.O_TRUNC
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
