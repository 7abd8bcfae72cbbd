"""A fork server that outlives a job: a test suite starts ranks in milliseconds, because torch is imported once.

`python -P -m everyrank.launch.zygote SOCKET MODULE ...` imports the modules, and waits for requests on an inherited
socket. For each request it forks a process that does what `python *arguments` would do, and reports how it ended.
It ends when its parent closes the socket.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from everyrank.launch import fork_server, worker
from everyrank.launch.job import FORK_SERVER, PYTHON, WORKER

__all__ = ["Zygote"]

_SIZE = struct.Struct("!I")


class ZygoteProcess:
    """A process that the zygote has forked, with the part of `subprocess.Popen` that the monitor uses."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, -N after signal N; None while it runs."""
        if self.returncode is None:
            self.returncode = self.zygote.status_of(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self.returncode = self.zygote.status_of(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode


class Zygote:
    """Starts the process on the first request, and again if it has ended. `close` ends it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.statuses: dict[int, int] = {}

    def can_start(self, command: Sequence[str]) -> bool:
        """Whether this is the command of a rank or of the fork server of a host, on a system where fork is safe."""
        is_known = tuple(command[: len(WORKER)]) in (WORKER, FORK_SERVER)
        return is_known and sys.platform == "linux"

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> ZygoteProcess:
        """Start the command with our standard output and error. Raises `RuntimeError` if the zygote cannot start."""
        connection = self._connect()
        request = pickle.dumps((list(command), dict(environment), os.getcwd()))  # noqa: PTH109
        with contextlib.suppress(ConnectionError):  # it has just ended, and sends no answer
            socket.send_fds(connection, [_SIZE.pack(len(request))], [1, 2])
            connection.sendall(request)
        while True:
            answer = self._read(None)
            if answer is None:
                raise RuntimeError("the fork server of the tests has ended")
            if "started" in answer:
                return ZygoteProcess(self, answer["started"])

    def status_of(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit status of a process; None if it still runs after `timeout` seconds (None: wait)."""
        while pid not in self.statuses:
            answer = self._read(timeout)
            if answer is None:
                return None if self.connection is not None else -signal.SIGKILL
        return self.statuses.pop(pid)

    def close(self) -> None:
        """End the zygote. Its processes end with their jobs."""
        if self.connection is not None:
            self.connection.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = self.connection = None

    def _connect(self) -> socket.socket:
        if self.connection is not None and self.process is not None and self.process.poll() is None:
            return self.connection
        self.close()  # it has ended, for example because the host had no memory left
        ours, theirs = socket.socketpair()
        command = [*PYTHON, "-m", "everyrank.launch.zygote", str(theirs.fileno()), *self.modules]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            start_new_session=True,
        )
        theirs.close()
        self.connection = ours
        return ours

    def _read(self, timeout: float | None) -> dict[str, int] | None:
        """Return the next answer; None if there is none in time, or the zygote has ended."""
        if self.connection is None or not select.select([self.connection], [], [], timeout)[0]:
            return None
        header = b""
        with contextlib.suppress(ConnectionError):  # it was killed before it had read a request
            header = self.connection.recv(_SIZE.size, socket.MSG_WAITALL)
        if len(header) < _SIZE.size:
            self.connection.close()
            self.connection = None
            return None
        answer: dict[str, int] = json.loads(self.connection.recv(_SIZE.unpack(header)[0], socket.MSG_WAITALL))
        if "ended" in answer:
            self.statuses[answer["ended"]] = answer["status"]
        return answer


# --- in the zygote


def main() -> None:
    """Serve requests until the parent closes the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    gc.disable()
    for name in sys.argv[2:]:
        with contextlib.suppress(Exception):  # the rank that needs it will report the error
            importlib.import_module(name)
    gc.freeze()
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([connection, reading], [], [])[0]
        if reading in ready:
            os.read(reading, 4096)
            _reap(connection)
        if connection in ready:
            header, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, 2)
            if len(header) < _SIZE.size:
                return
            request = connection.recv(_SIZE.unpack(header)[0], socket.MSG_WAITALL)
            child = os.fork()
            if child == 0:
                connection.close()
                _become(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            _answer(connection, {"started": child})


def _answer(connection: socket.socket, answer: Mapping[str, int]) -> None:
    content = json.dumps(answer).encode()
    with contextlib.suppress(OSError):
        connection.sendall(_SIZE.pack(len(content)) + content)


def _reap(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _answer(connection, {"ended": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def _become(request: bytes, descriptors: Sequence[int]) -> NoReturn:
    """Become the process that was requested: the fork server of a host, or one rank."""
    status = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        arguments, environment, folder = pickle.loads(request)  # noqa: S301  (sent by the parent)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if (random := sys.modules.get("numpy.random")) is not None:
            random.seed()
        module = fork_server if tuple(arguments[: len(FORK_SERVER)]) == FORK_SERVER else worker
        sys.argv = [str(module.__file__), *arguments[len(FORK_SERVER) :]]
        gc.enable()
        is_single = len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
        status = fork_server.main(is_checked=is_single) if module is fork_server else worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
