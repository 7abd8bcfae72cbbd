"""The process monitor: starts, watches and ends the processes of one job."""

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
from typing import IO, TYPE_CHECKING, Any

from everyrank.errors import RankFailedError, UsageError, kind_named, signal_text
from everyrank.launch.autopsy import FOLDER, forget_hang, hang_autopsy, hang_report
from everyrank.launch.host_info import has_driver, host_name
from everyrank.launch.job import Launch, job_name, starts_supervisors
from everyrank.launch.reports import Reports, ranks_text
from everyrank.launch.signals import Stop, catch_signals
from everyrank.launch.stalled_ranks import resume_stopped
from everyrank.launch.supervisor import write_whole

if TYPE_CHECKING:
    from everyrank.launch.zygote import Zygote, ZygoteProcess

__all__ = ["ProcessMonitor", "pass_on_output"]

_GRACE_SECONDS = 2.0  # after the first failure, so that other ranks can report theirs
_GRACE_FOR_WRONG_WORKLOADS_SECONDS = 6.0  # whether all ranks raise the same decides the exit status; they may be slow
_END_SECONDS = 2.0  # between SIGTERM and SIGKILL
_HEARTBEAT_SECONDS = 1.0  # for supervisors on other machines


class ProcessMonitor:
    """The processes of a job, started on entry of a `with` block. On exit, all that still run are ended."""

    def __init__(
        self,
        launch: Launch,
        directory: Path,
        logs: Path,
        stop: Stop | None = None,
        zygote: Zygote | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self.zygote, self.limit_seconds = zygote, limit_seconds
        self.launch = launch
        self.launcher = launch.row
        self.directory = directory
        self.job_name = job_name(launch, directory)
        self.logs = logs
        self.stop = stop
        self.launcher_log: IO[bytes] | None = None
        self.output: threading.Thread | None = None
        self.commands = self.launcher.commands(launch, directory)
        self.starts_supervisors = starts_supervisors(self.commands)
        self.processes: list[subprocess.Popen[bytes] | ZygoteProcess] = []
        self.heartbeat_at = 0.0
        self.grace_until: float | None = None
        # with one command per host, only the ranks of this host report to this process
        is_per_host = launch.nodes > 1 and self.launcher.launch_per_node
        count = launch.processes_per_node if is_per_host else launch.processes
        first_rank = (launch.node_rank or 0) * count if is_per_host else 0
        expected = range(first_rank, first_rank + count)
        self.reports = Reports(directory, logs, launch.processes, expected, launch)

    def __enter__(self) -> ProcessMonitor:
        for old_log in self._old_logs():
            with contextlib.suppress(FileNotFoundError):
                old_log.replace(old_log.with_name(old_log.name + ".before"))
        # The launcher's own messages go to a log, because they rarely name the cause of a failure.
        if not self.starts_supervisors:
            self.launcher_log = (self.logs / self._launcher_log_name).open("wb")
        forget_hang(self.logs / FOLDER, self.job_name)  # of an earlier start with the same rendezvous
        self._heartbeat()
        try:
            for command in self.commands:
                self.processes.append(self._start(command))
        except BaseException:  # Ctrl-C between two starts, when `__exit__` is not called
            self._end()
            raise
        return self

    @property
    def _launcher_log_name(self) -> str:
        # several hosts may share the folder
        return f"{self.launch.launcher}{f'-{host_name()}' if self.launch.nodes > 1 else ''}.log"

    def _old_logs(self) -> list[Path]:
        """Logs of the previous run that this host's ranks would overwrite."""
        if self.launch.nodes > 1 and self.launch.assigns_node_ranks:  # it is not yet known which ranks run here
            return [self.logs / self._launcher_log_name]
        ranks = (self.logs / f"rank{rank}.log" for rank in self.reports.expected)
        return [self.logs / self._launcher_log_name, *ranks]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes] | ZygoteProcess:
        if self.zygote is not None and self.zygote.can_start(command):
            return self.zygote.start(command, _child_environment())
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.launcher.line_prefix is not None else None,
            stderr=self.launcher_log,
            env={**_child_environment(), **self.launch.options.variables},
            # Ctrl-C reaches only this process, which then ends the others in order.
            start_new_session=True,
        )
        if self.launcher.line_prefix is not None:
            assert process.stdout is not None
            assert self.launcher_log is not None, "it does not start supervisors directly"
            self.output = pass_on_output(process.stdout, self.launcher.line_prefix, self.launcher_log)
        return process

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end()
        else:  # end processes that the workload started and did not end
            _signal(os.killpg, [process.pid for process in self.processes], signal.SIGKILL)
        if self.output is not None:
            self.output.join(_END_SECONDS)  # first show everything that rank 0 printed
        if self.launcher_log is not None:
            self.launcher_log.close()

    def wait(self) -> None:
        """Return when all processes have succeeded.

        Raises the root cause of a failure: the error of a rank, or `RankFailedError` for a rank that died.
        """
        # SIGUSR2 prints an autopsy, unless the caller uses that signal
        is_free = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        with catch_signals(*[signal.SIGUSR2] if is_free else []) as autopsy_request:
            self._wait(autopsy_request)

    def _wait(self, autopsy_request: Stop) -> None:
        # A host that joins a running job waits until the other hosts admit it, without a limit.
        has_limit = not self.launch.is_elastic
        deadline = time.monotonic() + self.launch.start_seconds if has_limit else 0
        num_forwarded, was_hang_shown = 0, False
        limit = time.monotonic() + (self.limit_seconds or 0.0)
        while True:
            codes = [process.poll() for process in self.processes]
            is_final = not self.launch.restarts_ranks or (self.stop is not None and self.stop.ends_ranks)
            failed = is_final and (self.reports.errors() or self._dead())
            has_failed = failed or any(code not in (None, 0) for code in codes)
            if has_failed and (not self._is_in_grace or None not in codes):
                self._raise_first_failure()
            if all(code == 0 for code in codes):
                return
            missing = [] if deadline == 0 else self.reports.not_started()
            if not missing:
                deadline = 0
            elif time.monotonic() > deadline:
                raise RankFailedError(
                    f"{ranks_text(missing)} of {self.launch.processes} never started: "
                    f"no report within {self.launch.start_seconds:g} s ({self.launch.start_flag}){self._last_line()}"
                    f"{self._waits_for_hosts(missing)}"
                )
            if self.stop is not None and self._is_stop_requested and num_forwarded < max(1, self.stop.count):
                num_forwarded = max(1, self.stop.count)
                self._forward_stop()
            if self.grace_until is not None and time.monotonic() > self.grace_until:
                assert self.stop is not None
                raise RankFailedError(
                    f"ranks that still ran {self.stop.grace_seconds:g} s after the signal were killed (--grace)"
                )
            if not was_hang_shown and (hang := hang_report(self.logs / FOLDER, self.job_name)):
                was_hang_shown = True
                print(f"everyrank: {hang}", file=sys.stderr, flush=True)
            if self.limit_seconds is not None and time.monotonic() > limit:
                autopsy = hang_autopsy(self.logs / FOLDER) or "no rank has written its state"
                raise RankFailedError(f"the ranks did not end within {self.limit_seconds:g} s: {autopsy}")
            if autopsy_request.asked is not None:
                autopsy_request.asked = None
                text = hang_autopsy(self.logs / FOLDER) or "no rank has written its state yet"
                print(f"everyrank: autopsy: {text}", file=sys.stderr, flush=True)
            if time.monotonic() > self.heartbeat_at + _HEARTBEAT_SECONDS:
                self._heartbeat()
            time.sleep(0.02 if missing or self.zygote is not None else 0.1)  # tests are short

    def results(self) -> dict[int, Any]:
        """Results of the function by rank. Raises `RankFailedError` if one is missing."""
        return self.reports.results(needs_all=not self.launch.restarts_ranks)

    def _heartbeat(self) -> None:
        self.heartbeat_at = time.monotonic()
        with contextlib.suppress(OSError):  # network storage may fail
            (self.directory / "alive").touch()
        resume_stopped(self.directory)

    @property
    def _is_stop_requested(self) -> bool:
        """Whether a signal has requested a stop."""
        return self.stop is not None and self.stop.asked is not None

    @property
    def _is_in_grace(self) -> bool:
        """Whether ranks are ending because a signal was passed on to them."""
        return self.grace_until is not None

    def _forward_stop(self) -> None:
        """Write the file for which each supervisor polls."""
        assert self.stop is not None
        if self.stop.grace_seconds is not None and self.stop.ends_ranks:
            self.grace_until = time.monotonic() + self.stop.grace_seconds
        write_whole(self.directory / "stop", self.stop.request.encode())

    def _dead(self) -> list[dict[str, Any]]:
        """Rank processes that ended without a result or an error, earliest first."""
        codes: dict[int, int | None] = {}
        if self.starts_supervisors:
            started = zip(
                self.reports.expected, itertools.cycle(self.processes), strict=False
            )  # one process for each rank, or one fork server
            codes = {rank: process.poll() for rank, process in started}
        return self.reports.dead(codes)

    def _raise_first_failure(self) -> None:
        """Wait shortly for the reports of other ranks, then raise the root cause."""
        errors, count = self.reports.errors(), len(self.reports.expected)
        is_wrong_call = bool(errors) and issubclass(kind_named(errors[0]["kind"]), UsageError)
        grace_seconds = _GRACE_FOR_WRONG_WORKLOADS_SECONDS if is_wrong_call else _GRACE_SECONDS
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and len(self.reports.errors()) + len(self._dead()) < count:
            time.sleep(0.02)
        if self.launcher_log is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(timeout=_GRACE_SECONDS)
        dead = self._dead()
        cause = self.reports.root_cause(dead)
        if cause is None or (self.launcher_log is not None and self.reports.were_terminated(dead)):
            message = f"{self._launcher_ended()}; {cause}" if cause is not None else self._launcher_ended()
            raise RankFailedError(message, self.logs / self._launcher_log_name)
        raise cause

    def _launcher_ended(self) -> str:
        """Return how the launcher ended, if no rank has reported anything."""
        code = next((process.poll() for process in self.processes if process.poll()), 0) or 0
        ending = f"was ended by {signal_text(-code)}" if code < 0 else "ended"
        if self.output is not None:
            self.output.join(_END_SECONDS)  # the last line is read below
        when = "after" if self.reports.processes() else "before"
        return f"{self.launch.launcher} {ending} {when} its ranks had started{self._last_line()}"

    def _waits_for_hosts(self, missing: list[int]) -> str:
        """Return what may be wrong if no rank of this host has started, and its launcher waits for the other hosts."""
        waits = self.launcher.launch_per_node and self.launcher.provides_rendezvous and self.launch.nodes > 1
        if not waits or len(missing) < len(self.reports.expected):
            return ""
        return f"; {self.launcher.name} waits until all {self.launch.nodes} hosts have joined: type the command on each"

    def _last_line(self) -> str:
        """Return the last line that the launcher printed."""
        if self.launcher_log is None:
            return ""
        text = (self.logs / self._launcher_log_name).read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
        return f": {self.launcher.explain(lines[-1], self.launch)}" if lines else ""

    def _end(self) -> None:
        """Send SIGTERM to all processes, then SIGKILL to their groups, which include data loader workers."""
        groups = [process.pid for process in self.processes]  # a process group may outlive its first process
        ranks = self.reports.processes()
        # Ranks that catch SIGTERM take it as a request to stop, so it is sent only to launchers that need it.
        if self.stop is None or self.launcher.graceful_shutdown:
            _signal(os.killpg, groups, signal.SIGTERM)
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
                time.sleep(0.02)
        _signal(os.killpg, groups, signal.SIGKILL)
        # the ranks of other launchers have separate process groups; on other hosts the supervisors end them
        if not self.starts_supervisors:
            own_group = os.getpgrp()
            _signal(os.kill, [pid for pid, _ in ranks], signal.SIGKILL)
            _signal(os.killpg, [group for _, group in ranks if group != own_group], signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _child_environment() -> dict[str, str]:
    # OMP_NUM_THREADS only avoids a warning of torchrun; `world` sets the number of threads. TTY_COMPATIBLE shows rich
    # in rank 0 whether its output reaches a terminal. TORCH_CPP_LOG_LEVEL silences warnings of c10d about names of
    # addresses, and errors that gloo also raises. With GPUs, messages of NCCL's watchdog are kept.
    terminal = str(int(sys.stdout.isatty()))
    level = "ERROR" if has_driver() else "FATAL"
    return {"OMP_NUM_THREADS": "1", "TTY_COMPATIBLE": terminal, "TORCH_CPP_LOG_LEVEL": level, **os.environ}


def _signal(send: Callable[[int, int], None], targets: Iterable[int], number: signal.Signals) -> None:
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(target, number)


# --- the output of rank 0, if its launcher adds a prefix to each line


_LINES = re.compile(rb"(?<=[\r\n])")  # a progress bar restarts its line by \r


def pass_on_output(printed: IO[bytes], prefix: bytes, other_output: IO[bytes]) -> threading.Thread:
    """Start a thread that copies the output of rank 0 to stdout, without the launcher's prefix.

    prefix         regular expression of what the launcher prints before each line of rank 0
    other_output   file for lines without the prefix
    """
    thread = threading.Thread(target=_pass_on, args=(printed, re.compile(prefix), other_output), daemon=True)
    thread.start()
    return thread


def _pass_on(printed: IO[bytes], prefix: re.Pattern[bytes], other_output: IO[bytes]) -> None:
    incomplete_line = b""
    with printed, os.fdopen(os.dup(1), "wb", buffering=0) as screen:
        while chunk := os.read(printed.fileno(), 65_536):
            *lines, incomplete_line = _LINES.split(incomplete_line + chunk)
            for line in lines:
                _write(line, prefix, screen, other_output)
        _write(incomplete_line, prefix, screen, other_output)


def _write(line: bytes, prefix: re.Pattern[bytes], screen: IO[bytes], other_output: IO[bytes]) -> None:
    match = prefix.match(line)
    if match is None:
        if not other_output.closed:
            other_output.write(line)
            other_output.flush()  # its last line may be the cause of a failure
        return
    text = memoryview(line)[match.end() :]
    while text:
        text = text[screen.write(text) :]
