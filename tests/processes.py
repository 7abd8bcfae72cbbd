"""Processes that the tests start through the fork server: pools of ranks, the command line, and commands on ranks."""

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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import cloudpickle
import pytest

from everyrank.cli import main
from everyrank.launch import Launch
from everyrank.launch.job import WORKER
from everyrank.launch.mpi import LAUNCHER
from forkserver import MARK, Forked, ForkServer

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def free_port() -> str:
    """Return a free TCP port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def rank_environment(rank: int, port: str, size: int = 2) -> dict[str, str]:
    """Return the environment variables of a rank that a user starts by hand."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


@contextlib.contextmanager
def closed_pipe() -> Iterator[TextIO]:
    """Yield a pipe whose reader has gone, as after `| head`."""
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    try:
        yield stream
    finally:
        with contextlib.suppress(BrokenPipeError):
            stream.close()


# --- pools of ranks that call functions


BACKEND = os.environ.get("EVERYRANK_TEST_BACKEND")  # the backend of a pool: gloo, mpi or None for the default


class Pool:
    """A pool of `count` ranks that wait for calls. Their rendezvous is a file, so no port is opened."""

    def __init__(self, server: ForkServer, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-pool-"))
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        if BACKEND == "mpi":
            self._start_by_mpirun(count)
            return
        for rank in range(count):
            pipe, rank_pipe = multiprocessing.Pipe()
            self.processes.append(self._start(server, rank, count, rank_pipe))
            rank_pipe.close()
            self.pipes.append(pipe)

    def _start(self, server: ForkServer, rank: int, count: int, pipe: Connection) -> Any:
        if sys.platform != "darwin":
            return server.fork(serve_calls, rank, count, self.folder, handles=[pipe.fileno()])
        # on macOS, a fork may crash if the process has used system frameworks
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=serve_calls, args=(rank, count, self.folder, pipe))
        process.start()
        return process

    def _start_by_mpirun(self, count: int) -> None:
        """Start the ranks with mpirun. They connect to a socket and send their ranks."""
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        mpirun_command = LAUNCHER.commands(Launch("mpi", processes=count), self.folder)[0][: -len(WORKER) - 1]
        code = "import processes, sys; processes.connect_to_pool(sys.argv[1])"
        with Listener(str(self.folder / "socket"), "AF_UNIX") as listener:
            command = [*mpirun_command, sys.executable, "-c", code, str(self.folder)]
            log = (self.folder / "mpirun.log").open("wb")
            self.processes = [subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)]
            pipes_by_rank: dict[int, Connection] = {}
            for _ in range(count):
                connection = listener.accept()
                pipes_by_rank[connection.recv()] = connection
        self.pipes = [pipes_by_rank[rank] for rank in range(count)]

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> list[Any]:
        """Return the results by rank. Raises AssertionError with the traceback of the rank that failed first."""
        payload = cloudpickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(payload)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            waiting = {rank: pipe for rank, pipe in enumerate(self.pipes) if rank not in answers}
            remaining_seconds = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=remaining_seconds)
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
        """Return the stacks of all threads of all running ranks."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        files = sorted(self.folder.glob("rank*.stack"))
        return "\n".join(f"--- {file.stem}\n{file.read_text()}" for file in files)

    def close(self) -> None:
        """End the processes, and kill those that do not end within 5 seconds."""
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


@contextlib.contextmanager
def open_pools() -> Iterator[dict[int, Pool]]:
    """Yield a dict for pools by their number of ranks, and close them at the end."""
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


def connect_to_pool(folder: str) -> None:
    """Connect to the pool, and serve its calls. This runs in a rank that mpirun has started."""
    rank_info = LAUNCHER.rank_info(os.environ)
    assert rank_info is not None
    pipe = Client(str(Path(folder) / "socket"), "AF_UNIX")
    pipe.send(rank_info.rank)
    serve_calls(rank_info.rank, rank_info.size, Path(folder), pipe)


def serve_calls(rank: int, count: int, folder: Path, pipe: Connection | None = None) -> None:
    """Call the functions that come through the pipe. This runs in a rank.

    In a forked rank, the pipe is descriptor 3.
    """
    pipe = pipe or Connection(3)
    faulthandler.register(signal.SIGUSR1, file=(folder / f"rank{rank}.stack").open("w"), all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # with more threads, inductor would start a pool of processes that import torch
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    warnings.filterwarnings("error", module=r"everyrank\..*")
    import torch

    import everyrank.world.barrier
    import everyrank.world.process_group
    from everyrank.launch import RankInfo
    from everyrank.world import open_world

    # The models of the tests are tiny, so a second thread would only wait for the first.
    everyrank.world.process_group.use_threads = lambda threads: torch.set_num_threads(1)
    everyrank.world.barrier.use_threads = everyrank.world.process_group.use_threads
    rank_info = RankInfo(rank, rank, count, count, "spawn", (folder / "rendezvous").as_uri())
    launch = Launch(processes=count, device="cpu", backend=BACKEND, timeout_seconds=60)
    with open_world(rank_info, launch) as world:
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
            gc.freeze()  # later collections skip objects that stay between calls, such as the caches of torch


def _end_loader_workers() -> None:
    """Kill the loader workers of a failed call. Otherwise their loader would wait five seconds for each of them."""
    children = multiprocessing.active_children()
    if not children:
        return
    # the handler of torch would raise for a killed worker
    previous_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in children:
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, previous_handler)


# --- the command line, as a user types it


def marked_processes(mark: str) -> dict[int, str]:
    """Return the command line of every other process with this mark, by process id."""
    command_lines: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    command_lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return command_lines


def wait_for_marked_processes(mark: str, seconds: float = 60.0) -> dict[int, str]:
    """Wait until no process has the mark, at most `seconds`. Return the command lines of those that still run."""
    deadline = time.monotonic() + seconds
    while (remaining := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


class EndedCommand(NamedTuple):
    """The exit status and output of a command."""

    status: int
    out: str
    err: str


class EndedRanks(NamedTuple):
    """The exit status of each rank of a command, and the output of rank 0."""

    statuses: list[int]
    out: str
    err: str

    @property
    def status(self) -> int:
        """Return the exit status, which is the same on all ranks."""
        assert len(set(self.statuses)) == 1, self
        return self.statuses[0]


class RunningCommand:
    """A command line as a child process, with all processes that have its mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.process: Any = None
        self.streams = [(folder.parent / f"{folder.name}-{self.mark}.{name}") for name in ("out", "err")]

    def end(self, timeout: float = 200.0) -> EndedCommand:
        """Wait until the process ends. Return its status, stdout and stderr."""
        return EndedCommand(self.process.wait(timeout), *self.output_so_far())

    def output_so_far(self) -> tuple[str, str]:
        """Return stdout and stderr so far."""
        return self.streams[0].read_text(errors="replace"), self.streams[1].read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], seconds: float = 200.0) -> Any:
        """Wait until the condition holds, and return its value.

        Fails if the process has ended or `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        is_running = True
        while is_running and time.monotonic() < deadline:
            is_running = self.process.poll() is None
            if value := condition():
                return value
            time.sleep(0.02)
        raise AssertionError(f"the condition did not become true: {self.output_so_far()}")

    def processes(self) -> dict[int, str]:
        """Return every process with the mark, by process id."""
        return marked_processes(self.mark)

    def remaining_processes(self) -> dict[int, str]:
        """Wait until no process has the mark, at most 60 seconds. Return the command lines of those that still run."""
        return wait_for_marked_processes(self.mark)

    def close(self) -> None:
        """Kill all processes with the mark."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(self.process, Forked):
            self.process.close()
        elif self.process is not None:
            self.process.wait(20)


class Cli:
    """The command line of everyrank. It is run to its end, started, or run on ranks as an external launcher does."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.running_commands: list[RunningCommand] = []

    def __call__(self, folder: Path, *args: object, is_forked: bool = True, **variables: str) -> EndedCommand:
        """Run `everyrank *args` in that folder to its end. The command starts its own ranks."""
        # on a busy machine, a second thread makes the command slower
        running = self.start(folder, *args, is_forked=is_forked, **{"OMP_NUM_THREADS": "1", **variables})
        try:
            return running.end()
        finally:
            self.close(running)

    def start(
        self,
        folder: Path,
        *args: object,
        command: tuple[str, ...] = ("-m", "everyrank"),
        wrapper: tuple[str, ...] = (),
        is_forked: bool = True,
        **variables: str,
    ) -> RunningCommand:
        """Start a command in its own session, as a terminal does. `is_forked=False` starts Python itself.

        `wrapper` is the command of a program that starts Python, such as `prlimit`. Commands that still run at the
        end of the test are killed.
        """
        if args[:1] == ("audit",) and not {"--compare", "--no-compare", "--only-compare"} & set(args):
            args = ("audit", "--no-compare", *args[1:])  # tests of the audit rules need no comparison run of the script
        running = RunningCommand(folder)
        self.running_commands.append(running)
        environment = {**os.environ, **variables, MARK: running.mark}
        with running.streams[0].open("wb") as out, running.streams[1].open("wb") as err:
            if is_forked and not wrapper:
                streams = (None, out, err)
                running.process = self.server.start(folder, *command, *args, streams=streams, environment=environment)
            else:
                python = self.server.programs / "python" if is_forked else sys.executable
                running.process = subprocess.Popen(
                    [*wrapper, python, *command, *map(str, args)],
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        return running

    def on_ranks(self, folder: Path, *args: object, size: int = 1, script: str = "", **variables: str) -> EndedRanks:
        """Run `everyrank *args`, or a script with these arguments, on `size` ranks, as torchrun does."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun also keeps a store open
        launcher_variables = {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
        launcher_variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        command = [script, *args] if script else ["-m", "everyrank", *args]
        ranks: list[Forked] = []
        for rank in range(size):
            environment = {
                **os.environ,
                **launcher_variables,
                **rank_environment(rank, str(store.port), size),
                **variables,
            }
            with (folder / f"rank{rank}.out").open("wb") as out, (folder / f"rank{rank}.err").open("wb") as err:
                streams = (None, out, err)
                ranks.append(self.server.start(folder, *command, streams=streams, environment=environment))
        try:
            statuses = [rank.wait(200) for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()
        return EndedRanks(statuses, (folder / "rank0.out").read_text(), (folder / "rank0.err").read_text())

    def close(self, *commands: RunningCommand) -> None:
        """Kill these commands, or all that still run, with all processes that they have started."""
        for command in commands or list(self.running_commands):
            self.running_commands.remove(command)
            command.close()


def refusal_message(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run a command in this process. Check that its exit status is 2, and return its one line on stderr."""
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        status = main([str(arg) for arg in args])
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    captured = capsys.readouterr()
    assert status == 2, captured.out + captured.err
    return only_error_line(captured.err)


def only_error_line(stderr: str) -> str:
    """Check that stderr is one line of everyrank without a traceback, and return it."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("everyrank: "), stderr
    return lines[0]
