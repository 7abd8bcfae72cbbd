"""The processes of one job: start them, watch them, end them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from everyrank.errors import RankFailedError, signal_text
from everyrank.launch.autopsy import FOLDER, hang_autopsy
from everyrank.launch.host_info import has_driver, host_name
from everyrank.launch.job import Launch, starts_supervisors
from everyrank.launch.reports import Reports, ranks_text
from everyrank.launch.signals import Stop, catch_signals
from everyrank.launch.stalled_ranks import resume_stopped

__all__ = ["ProcessMonitor", "pass_on_output"]

_GRACE_SECONDS = 2.0  # after the first failure, for the others to say what they saw
_END_SECONDS = 2.0  # between SIGTERM and SIGKILL
_BEAT_SECONDS = 1.0  # for supervisors on other machines


class ProcessMonitor:
    """The started processes. Leaving the block ends whatever still runs, however the block is left."""

    def __init__(self, launch: Launch, directory: Path, logs: Path, stop: Stop | None = None) -> None:
        self.launch = launch
        self.launcher = launch.row
        self.directory = directory
        self.logs = logs
        self.stop = stop
        self.launcher_log: IO[bytes] | None = None
        self.output: threading.Thread | None = None
        self.commands = self.launcher.commands(launch, directory)
        self.starts_supervisors = starts_supervisors(self.commands)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.beat_at = 0.0
        # where each host starts its own, only theirs report here
        is_one_of_several = launch.nodes > 1 and self.launcher.launch_per_node
        count = launch.processes_per_node if is_one_of_several else launch.processes
        first = (launch.node_rank or 0) * count if is_one_of_several else 0
        expected = range(first, first + count)
        self.reports = Reports(directory, logs, launch.processes, expected, launch)

    def __enter__(self) -> ProcessMonitor:
        for stale in self._logs_of_before():
            with contextlib.suppress(FileNotFoundError):
                stale.replace(stale.with_name(stale.name + ".before"))
        # A launcher's own messages are kept away from the screen: what it says of a failure is not what failed.
        if not self.starts_supervisors:
            self.launcher_log = (self.logs / self._launcher_log_name).open("wb")
        self._beat()
        try:
            for command in self.commands:
                self.processes.append(self._start(command))
        except BaseException:  # Ctrl-C between two starts: `__exit__` would not be called
            self._end()
            raise
        return self

    @property
    def _launcher_log_name(self) -> str:
        # hosts that each start their own may share the folder
        return f"{self.launch.launcher}{f'-{host_name()}' if self.launch.nodes > 1 else ''}.log"

    def _logs_of_before(self) -> list[Path]:
        """Those that this host's ranks are about to write, from the run before."""
        if self.launch.nodes > 1 and self.launch.assigns_node_ranks:  # which ranks are here is decided later
            return [self.logs / self._launcher_log_name]
        ranks = (self.logs / f"rank{rank}.log" for rank in self.reports.expected)
        return [self.logs / self._launcher_log_name, *ranks]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.launcher.line_prefix is not None else None,
            stderr=self.launcher_log,
            env={**_child_environment(), **self.launch.options.variables},
            # Ctrl-C reaches this process alone, which then ends them all in order.
            start_new_session=True,
        )
        if self.launcher.line_prefix is not None:
            assert process.stdout is not None
            assert self.launcher_log is not None, "it starts no supervisors itself"
            self.output = pass_on_output(process.stdout, self.launcher.line_prefix, self.launcher_log)
        return process

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end()
        else:  # what a workload has started and forgotten
            _signal(os.killpg, [process.pid for process in self.processes], signal.SIGKILL)
        if self.output is not None:
            self.output.join(_END_SECONDS)  # what rank 0 has printed is on the screen before anything else is
        if self.launcher_log is not None:
            self.launcher_log.close()

    def wait(self) -> None:
        """Return when every process has ended well.

        Raises what went wrong first: the error of a rank, or `RankFailedError` for one that died or never started.
        """
        # where nobody else listens to it, the signal asks where the ranks stand
        is_free = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        with catch_signals(*[signal.SIGUSR2] if is_free else []) as question:
            self._wait(question)

    def _wait(self, question: Stop) -> None:
        # a host that comes to a running job waits until the others take it in; a spare one, until they need it
        has_limit = not self.launch.is_elastic
        deadline = time.monotonic() + self.launch.start_seconds if has_limit else 0
        is_asked = False
        while True:
            codes = [process.poll() for process in self.processes]
            is_final = not self.launch.restarts_ranks or self._is_asked
            failed = is_final and (self.reports.errors() or self._dead())
            if failed or any(code not in (None, 0) for code in codes):
                self._raise_first_failure()
            if all(code == 0 for code in codes):
                return
            missing = [] if deadline == 0 else self.reports.not_started()
            if not missing:
                deadline = 0
            elif time.monotonic() > deadline:
                raise RankFailedError(
                    f"{ranks_text(missing)} of {self.launch.processes} never started: "
                    f"no sign within {self.launch.start_seconds:g} s ({self.launch.start_flag}){self._last_words()}"
                )
            if self._is_asked and not is_asked:
                is_asked = True
                (self.directory / "stop").touch()  # each rank's supervisor looks for it
            if question.asked is not None:
                question.asked = None
                found = hang_autopsy(self.logs / FOLDER) or "no rank has left its state yet"
                print(f"everyrank: autopsy: {found}", file=sys.stderr, flush=True)
            if time.monotonic() > self.beat_at + _BEAT_SECONDS:
                self._beat()
            time.sleep(0.02 if missing else 0.1)

    def results(self) -> dict[int, Any]:
        """What the function returned, by rank, of those that report here; `RankFailedError` where one left nothing."""
        return self.reports.results(needs_all=not self.launch.restarts_ranks)

    def _beat(self) -> None:
        self.beat_at = time.monotonic()
        with contextlib.suppress(OSError):  # of storage elsewhere
            (self.directory / "alive").touch()
        resume_stopped(self.directory)

    @property
    def _is_asked(self) -> bool:
        """Whether a signal has asked the training to stop."""
        return self.stop is not None and self.stop.asked is not None

    def _dead(self) -> list[dict[str, Any]]:
        """Rank processes that ended without a result or an error, earliest first."""
        codes: dict[int, int | None] = {}
        if self.starts_supervisors:
            started = zip(self.reports.expected, itertools.cycle(self.processes), strict=False)  # or one fork server
            codes = {rank: process.poll() for rank, process in started}
        return self.reports.dead(codes)

    def _raise_first_failure(self) -> None:
        """Let the others say what they saw, then raise the root cause."""
        deadline, count = time.monotonic() + _GRACE_SECONDS, len(self.reports.expected)
        while time.monotonic() < deadline and len(self.reports.errors()) + len(self._dead()) < count:
            time.sleep(0.02)
        if self.launcher_log is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(timeout=_GRACE_SECONDS)
        raise self.reports.root_cause(self._dead()) or RankFailedError(
            self._launcher_ended(), self.logs / self._launcher_log_name
        )

    def _launcher_ended(self) -> str:
        """How the launcher itself has ended, where no rank has said anything."""
        code = next((process.poll() for process in self.processes if process.poll()), 0) or 0
        how = f"was ended by {signal_text(-code)}" if code < 0 else "ended"
        if self.reports.processes():
            return f"{self.launch.launcher} {how} after its ranks had started"
        return f"{self.launch.launcher} {how} before its ranks had started{self._last_words()}"

    def _last_words(self) -> str:
        """The last line that a launcher said."""
        if self.launcher_log is None:
            return ""
        text = (self.logs / self._launcher_log_name).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
        return f": {lines[-1]}" if lines else ""

    def _end(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left; their data loader workers are in the same groups."""
        groups = [process.pid for process in self.processes]  # a group may outlive the rank that led it
        ranks = self.reports.processes()
        # ranks that catch signals take SIGTERM for a request to stop; these launchers must end in order all the same
        if self.stop is None or self.launcher.graceful_shutdown:
            _signal(os.killpg, groups, signal.SIGTERM)
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
                time.sleep(0.02)
        _signal(os.killpg, groups, signal.SIGKILL)
        if not self.starts_supervisors:  # their ranks have groups of their own; on other hosts supervisors see
            mine = os.getpgrp()
            _signal(os.kill, [pid for pid, _ in ranks], signal.SIGKILL)
            _signal(os.killpg, [group for _, group in ranks if group != mine], signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _child_environment() -> dict[str, str]:
    # The world sets the number of threads itself; the first variable only spares torchrun its warning. The second
    # tells rich, in rank 0, whether there is a terminal at the end of what a launcher passes on. Without the third,
    # c10d warns when it cannot find the name of an address, and gloo prints what it also raises, in a rank that only
    # answers the loss of another one. What NCCL's watchdog says is nowhere else.
    terminal = str(int(sys.stdout.isatty()))
    level = "ERROR" if has_driver() else "FATAL"
    return {"OMP_NUM_THREADS": "1", "TTY_COMPATIBLE": terminal, "TORCH_CPP_LOG_LEVEL": level, **os.environ}


def _signal(send: Callable[[int, int], None], targets: Iterable[int], number: signal.Signals) -> None:
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(target, number)


# --- what rank 0 prints, where its launcher puts a mark before each line


_LINES = re.compile(rb"(?<=[\r\n])")  # a progress bar begins its line again by \r


def pass_on_output(printed: IO[bytes], mark: bytes, others: IO[bytes]) -> threading.Thread:
    """Start to write to this process's own output what rank 0 prints, until the launcher has closed `printed`.

    mark     a regular expression of what the launcher puts before each line of rank 0
    others   the file for lines without it: what the launcher itself says
    """
    thread = threading.Thread(target=_pass_on, args=(printed, re.compile(mark), others), daemon=True)
    thread.start()
    return thread


def _pass_on(printed: IO[bytes], mark: re.Pattern[bytes], others: IO[bytes]) -> None:
    rest = b""
    with printed, os.fdopen(os.dup(1), "wb", buffering=0) as screen:
        while chunk := os.read(printed.fileno(), 65_536):
            *lines, rest = _LINES.split(rest + chunk)
            for line in lines:
                _write(line, mark, screen, others)
        _write(rest, mark, screen, others)


def _write(line: bytes, mark: re.Pattern[bytes], screen: IO[bytes], others: IO[bytes]) -> None:
    found = mark.match(line)
    if found is None:
        if not others.closed:
            others.write(line)
        return
    left = memoryview(line)[found.end() :]
    while left:
        left = left[screen.write(left) :]
