"""What the tests start through the fork server: ranks that stay, ranks of one command, and the command line itself."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest

from everyrank.cli import main
from everyrank.launch import Launch
from everyrank.launch.job import WORKER
from everyrank.launch.mpi import LAUNCHER
from forkserver import MARK, Forked, ForkServer

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def by_hand(rank: int, port: str, size: int = 2) -> dict[str, str]:
    """The environment of a rank that a person starts."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


# --- ranks that stay, and call functions


BACKEND = os.environ.get("EVERYRANK_TEST_BACKEND")  # what carries the calls of a pool: gloo or mpi; else the default


class Pool:
    """`count` ranks that wait for calls. They meet over a file, so no port is opened."""

    def __init__(self, server: ForkServer, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-pool-"))
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        if BACKEND == "mpi":
            self._start_by_mpirun(count)
            return
        for rank in range(count):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(self._start(server, rank, count, theirs))
            theirs.close()
            self.pipes.append(ours)

    def _start(self, server: ForkServer, rank: int, count: int, pipe: Connection) -> Any:
        if sys.platform != "darwin":
            return server.fork(serve_calls, rank, count, self.folder, handles=[pipe.fileno()])
        # on macOS a fork of what has used its frameworks may crash
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=serve_calls, args=(rank, count, self.folder, pipe))
        process.start()
        return process

    def _start_by_mpirun(self, count: int) -> None:
        """MPI starts its ranks itself: they come to a socket, and say which they are."""
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        words = LAUNCHER.commands(Launch("mpi", processes=count), self.folder)[0][: -len(WORKER) - 1]
        code = "import processes, sys; processes.come_to(sys.argv[1])"
        with Listener(str(self.folder / "socket"), "AF_UNIX") as listening:
            command = [*words, sys.executable, "-c", code, str(self.folder)]
            log = (self.folder / "mpirun.log").open("wb")
            self.processes = [subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)]
            there: dict[int, Connection] = {}
            for _ in range(count):
                connection = listening.accept()
                there[connection.recv()] = connection
        self.pipes = [there[rank] for rank in range(count)]

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        """Results by rank. Raises AssertionError with the traceback of the rank that failed first."""
        payload = cloudpickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(payload)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            waiting = {rank: pipe for rank, pipe in enumerate(self.pipes) if rank not in answers}
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=left)
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting)} did not answer within {timeout:g} s\n{self._stacks()}")
            for rank, pipe in waiting.items():
                if pipe in ready:
                    try:
                        answers[rank] = cloudpickle.loads(pipe.recv_bytes())
                    except EOFError:
                        raise AssertionError(f"rank {rank} died\n{self._stacks()}") from None
                    if not answers[rank][0]:
                        raise AssertionError(f"rank {rank} raised:\n{answers[rank][1]}")
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def _stacks(self) -> str:
        """The stack of every thread of every rank that still lives."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        files = sorted(self.folder.glob("rank*.stack"))
        return "\n".join(f"--- {file.stem}\n{file.read_text()}" for file in files)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            if isinstance(process, Forked | subprocess.Popen):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
            else:
                process.join(5.0)
            process.kill()
            if not isinstance(process, subprocess.Popen):
                process.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def come_to(folder: str) -> None:
    """In a rank that mpirun has started."""
    info = LAUNCHER.rank_info(os.environ)
    assert info is not None
    pipe = Client(str(Path(folder) / "socket"), "AF_UNIX")
    pipe.send(info.rank)
    serve_calls(info.rank, info.size, Path(folder), pipe)


def serve_calls(rank: int, count: int, folder: Path, pipe: Connection | None = None) -> None:
    """In a rank: call what comes through the pipe, which is its first open file where it was forked."""
    pipe = pipe or Connection(3)
    faulthandler.register(signal.SIGUSR1, file=(folder / f"rank{rank}.stack").open("w"), all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more: a pool of processes that import torch
    warnings.filterwarnings("error", module=r"everyrank\..*")
    import torch

    import everyrank.world.barrier
    import everyrank.world.process_group
    from everyrank.launch import RankInfo
    from everyrank.world import open_world

    # The models of the tests are tiny: a second thread would only wait for the first.
    everyrank.world.process_group.use_threads = lambda threads: torch.set_num_threads(1)
    everyrank.world.barrier.use_threads = everyrank.world.process_group.use_threads
    info = RankInfo(rank, rank, count, count, "spawn", (folder / "rendezvous").as_uri())
    launch = Launch(processes=count, device="cpu", backend=BACKEND, timeout_seconds=60)
    with open_world(info, launch) as world:
        assert BACKEND in (None, world.backend)
        while True:
            try:
                function, arguments = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                os._exit(0)
            try:
                answer = (True, function(world, *arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            _end_loader_workers()
            pipe.send_bytes(cloudpickle.dumps(answer))
            del function, arguments, answer
            gc.collect()
            gc.freeze()  # what is kept over the calls (torch's caches grow) is not looked through in each of them


def _end_loader_workers() -> None:
    """Those of a call that failed: their loader, garbage by then, would wait five seconds for each of them."""
    children = multiprocessing.active_children()
    if not children:
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would raise for a worker that was killed
    for child in children:
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, before)


# --- the command line, as a person types it


def processes_of(mark: str) -> dict[int, str]:
    """Every process but this one that carries the mark: its command line, by id."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def left_of(mark: str, seconds: float = 60.0) -> dict[int, str]:
    """What carries the mark and is still there after that long; {} as soon as nothing is."""
    deadline = time.monotonic() + seconds
    while (found := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


class Done(NamedTuple):
    """How a command on several ranks ended: the status of each, and the output of rank 0."""

    statuses: list[int]
    out: str
    err: str

    @property
    def status(self) -> int:
        """The status of all ranks."""
        assert len(set(self.statuses)) == 1, self
        return self.statuses[0]


class Running:
    """A command line as a child process, and all processes that carry its mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.process: Any = None
        self.streams = [(folder.parent / f"{folder.name}-{self.mark}.{name}") for name in ("out", "err")]

    def end(self, timeout: float = 120.0) -> Ended:
        """Wait for its end: status, stdout, stderr."""
        return Ended(self.process.wait(timeout), *self.said())

    def said(self) -> tuple[str, str]:
        """stdout and stderr so far."""
        return self.streams[0].read_text(errors="replace"), self.streams[1].read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """What the condition gives as soon as it holds; fails where the process has ended before."""
        deadline = time.monotonic() + seconds
        is_running = True
        while is_running and time.monotonic() < deadline:
            is_running = self.process.poll() is None
            if found := condition():
                return found
            time.sleep(0.02)
        raise AssertionError(f"it never came to that: {self.said()}")

    def processes(self) -> dict[int, str]:
        """Every process that carries the mark, by id."""
        return processes_of(self.mark)

    def left(self) -> dict[int, str]:
        """What is still there after a while; {} as soon as nothing is."""
        return left_of(self.mark)

    def close(self) -> None:
        """End all of it."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(self.process, Forked):
            self.process.close()
        elif self.process is not None:
            self.process.wait(20)


class Cli:
    """The command line: run to its end, started, or run on ranks that are started from outside."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.running: list[Running] = []

    def __call__(self, folder: Path, *words: object, is_forked: bool = True, **variables: str) -> Ended:
        """Run `everyrank *words` in that folder, as a process that starts its own ranks, to its end."""
        # on a machine that is busy, a second thread is waited for
        started = self.start(folder, *words, is_forked=is_forked, **{"OMP_NUM_THREADS": "1", **variables})
        try:
            return started.end()
        finally:
            self.close(started)

    def start(
        self,
        folder: Path,
        *words: object,
        command: tuple[str, ...] = ("-m", "everyrank"),
        before: tuple[str, ...] = (),
        is_forked: bool = True,
        **variables: str,
    ) -> Running:
        """Start it in a session of its own, as a terminal would; `is_forked=False` starts Python itself.

        `before` are the words of a program that starts Python. What still runs at the end of the test is ended.
        """
        if words[:1] == ("audit",) and not {"--compare", "--no-compare", "--only-compare"} & set(words):
            words = ("audit", "--no-compare", *words[1:])  # the tests of the rules need no other run of the script
        started = Running(folder)
        self.running.append(started)
        environment = {**os.environ, **variables, MARK: started.mark}
        with started.streams[0].open("wb") as out, started.streams[1].open("wb") as err:
            if is_forked and not before:
                streams = (None, out, err)
                started.process = self.server.start(folder, *command, *words, streams=streams, environment=environment)
            else:
                python = self.server.programs / "python" if is_forked else sys.executable
                started.process = subprocess.Popen(
                    [*before, python, *command, *map(str, words)],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        return started

    def on_ranks(self, folder: Path, *words: object, size: int = 1, script: str = "", **variables: str) -> Done:
        """Run `everyrank *words`, or a script of that name with these words, on so many ranks, as torchrun does."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has it open
        own = {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
        own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        command = [script, *words] if script else ["-m", "everyrank", *words]
        ranks: list[Forked] = []
        for rank in range(size):
            environment = {**os.environ, **own, **by_hand(rank, str(store.port), size), **variables}
            with (folder / f"rank{rank}.out").open("wb") as out, (folder / f"rank{rank}.err").open("wb") as err:
                streams = (None, out, err)
                ranks.append(self.server.start(folder, *command, streams=streams, environment=environment))
        try:
            statuses = [rank.wait(200) for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()
        return Done(statuses, (folder / "rank0.out").read_text(), (folder / "rank0.err").read_text())

    def close(self, *commands: Running) -> None:
        """End these commands, or all that still run, with all that they have started."""
        for command in commands or list(self.running):
            self.running.remove(command)
            command.close()


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which the command line ends in this process, with status 2."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = main([str(word) for word in words])
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    assert status == 2, printed.out + printed.err
    return one_line(printed.err)


def one_line(stderr: str) -> str:
    """The only line on stderr."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("everyrank: "), stderr
    return lines[0]
