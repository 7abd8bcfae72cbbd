"""A process that has imported everything forks the processes of the tests: ranks, commands and scripts.

A start of Python takes four to seven CPU seconds for imports. A fork takes some milliseconds. A forked process can be
killed. It has its own id, session, standard streams, environment, working directory and exit status. If it starts the
ranks of a job (`python -m everyrank...`), these are forked, too.

There are three differences from a new process. `/proc/ID/cmdline` is that of the server. Modules that the test has not
imported are already imported. `gc.unfreeze` does nothing. So a few tests start Python itself with `is_forked=False`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import multiprocessing
import multiprocessing.util
import os
import pickle
import re
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from everyrank.launch.monitor import _child_environment

# This script is `python` and `torchrun` for a shell. It sends its arguments, open files and environment to the server.
# Then it forwards its signals. `--open=5,7` passes more open files, with the same numbers.
PROGRAM = """\
#!{python} -ES
import os, pickle, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
args, passed_files = {before!r} + sys.argv[1:], []
if args and args[0].startswith("--open="):
    passed_files = list(map(int, args.pop(0)[7:].split(",")))
content = pickle.dumps(("run_python_here", (args, os.getcwd(), passed_files), os.getcwd(), dict(os.environ)))
namespace_files = [os.open(path, os.O_RDONLY) for path in {namespaces!r}]
socket.send_fds(server, [struct.pack("i", len(content))], [0, 1, 2, *namespace_files, *passed_files])
server.sendall(content)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: server.send(bytes([number])))
child, status = struct.unpack("ii", server.makefile("rb").read(8))  # a signal does not cut it short
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
AUDIT = "EVERYRANK_AUDIT"  # the settings of the hooks, in the environment of an audited script
MARK = "EVERYRANK_TEST_MARK"  # this variable identifies the processes of a test in /proc
_NO_MARK = "-" * 32
_STREAMS = 3
# the namespaces of a simulated host on Linux: network, host name and mounts (for /sys)
_NAMESPACES = [path for path in ("/proc/self/ns/net", "/proc/self/ns/uts", "/proc/self/ns/mnt") if os.path.exists(path)]  # noqa: PTH110


# --- in the tests


class Forked:
    """A forked process with the interface of `subprocess.Popen`. It is killed when this object is deleted."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        # __del__ would be too late: in a reference cycle, the socket may be deleted first, and Python warns
        weakref.finalize(self, connection.close)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        """Receive an integer from the server."""
        content = self.connection.recv(4, socket.MSG_WAITALL)
        if len(content) < 4:
            raise RuntimeError("the fork server is gone")
        return struct.unpack("i", content)[0]

    def poll(self) -> int | None:
        """Return the exit status, or None if the process still runs. The status is -N after signal N."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return its exit status. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None and not select.select([self.connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """Send SIGKILL only to this process."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Kill the process and its session, if they still run."""
        self.connection.close()


class ForkServer:
    """A server that starts with its first request.

    preload   its imports: "all" that tests need, "transformers" in addition, or only "torch", with what an optimizer
              imports. With "torch", a script has to import the rest itself.
    """

    def __init__(self, preload: str = "all") -> None:
        self.preload = preload
        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-fork-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.torch: ForkServer | None = None

    def _serve(self) -> None:
        if self.process is not None:
            return
        # one thread, because a fork loses the others; each forked process overwrites the mark
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", MARK: _NO_MARK}
        code = "import forkserver, sys; forkserver.serve(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.address, self.preload],
            stdin=subprocess.PIPE,  # the server ends when this is closed
            env={**_child_environment(), **variables},  # torch reads its log level only when it is imported
            start_new_session=True,
        )
        while not Path(self.address).exists():
            assert self.process.poll() is None, "the fork server could not start"
            time.sleep(0.01)
        folder = _programs(self.address)
        folder.mkdir()
        for name, first_args in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
            fields = {"address": self.address, "before": first_args, "namespaces": _NAMESPACES}
            (folder / name).write_text(PROGRAM.format(python=sys.executable, **fields))
            (folder / name).chmod(0o755)

    @property
    def programs(self) -> Path:
        """Return a folder with `python` and `torchrun`. Their processes are forked."""
        self._serve()
        return _programs(self.address)

    @property
    def torch_programs(self) -> Path:
        """Return a folder with `python` and `torchrun`, with only torch imported.

        So a missing import fails as it does for a user.
        """
        if self.torch is None:
            self.torch = ForkServer("torch")
        return self.torch.programs

    @property
    def address(self) -> str:
        return str(self.folder / "socket")

    def fork(
        self,
        function: Callable[..., object],
        *arguments: object,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        streams: Sequence[IO[Any] | int | None] = (None, None, None),
        handles: Sequence[int] = (),
    ) -> Forked:
        """Call a function of a module in a new process, which has the descriptors `handles` from 3 on.

        In `streams` (stdin, stdout, stderr), None is an empty stdin, and the caller's stdout or stderr.
        """
        self._serve()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        request = (function, arguments, str(folder or Path.cwd()), dict(environment or os.environ))
        with Path(os.devnull).open("rb") as devnull:
            files = [devnull if stream is None and not index else stream for index, stream in enumerate(streams)]
            descriptors = [index if stream is None else _fileno(stream) for index, stream in enumerate(files)]
            send_request(connection, request, [*descriptors, *handles])
        return Forked(connection)

    def start(
        self,
        folder: Path,
        *args: object,
        streams: Sequence[IO[Any] | int | None] = (None, None, None),
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """Start `python *args` without the seconds of its imports."""
        return self.fork(run_python, list(map(str, args)), folder=folder, environment=environment, streams=streams)

    def close(self) -> None:
        if self.torch is not None:
            self.torch.close()
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)


def _programs(address: str) -> Path:
    return Path(address).with_name("bin")


def _fileno(stream: IO[Any] | int) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def send_request(connection: socket.socket, request: object, descriptors: Sequence[int]) -> None:
    """Send a request with the open files that have these descriptors."""
    content = pickle.dumps(request)
    socket.send_fds(connection, [struct.pack("i", len(content))], descriptors)
    connection.sendall(content)


# --- in the server


def serve(address: str, preload: str) -> None:
    """Import what the tests need, then fork until standard input ends."""
    _ForkingPopen.address = address
    subprocess.Popen = _ForkingPopen  # before the import of torchrun's agent, which keeps a reference to Popen
    importlib.import_module("torch")
    importlib.import_module("torch._dynamo")  # the first optimizer of a process imports it, in more than a CPU second
    if preload != "torch":
        _preload()
    if preload == "transformers":
        from everyrank import find_workload
        from everyrank.builtin.causal_lm import FAMILIES

        for family in FAMILIES:
            find_workload("causal-lm", family=family, num_blocks=1, width=32).model()
    _forget_finalizers()  # torch has finalizers of its libraries, which each process would run at its end
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # the memory pages of existing objects stay shared
    gc.unfreeze = lambda: None  # a world unfreezes at its end, and the next collection took most of a short run
    multiprocessing.util.spawnv_passfds = _spawnv_passfds
    started: dict[socket.socket, int] = {}  # the id of the running process that each connection requested
    child_ended_reader, child_ended_writer = os.pipe()
    os.set_blocking(child_ended_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(child_ended_writer)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".new")
        listener.listen(64)
        Path(address + ".new").rename(address)
        while True:
            ready, _, _ = select.select([listener, 0, child_ended_reader, *started], [], [])
            if 0 in ready:
                break
            if child_ended_reader in ready:
                os.read(child_ended_reader, 4096)
                _send_exit_statuses(started)
            for connection in started.keys() & set(ready):
                _forward_signal_or_kill(connection, started[connection])
            if listener in ready:
                connection, _ = listener.accept()
                with contextlib.suppress(EOFError):
                    started[connection] = _start(connection)
    for child in started.values():
        _kill(child)
    with contextlib.suppress(ChildProcessError):  # the CPU time of children counts only after wait
        while True:
            os.wait()


def _preload() -> None:
    """Import the modules that tests need."""
    import pkgutil

    import torch.distributed.checkpoint
    import torch.distributed.elastic.multiprocessing
    import torch.distributed.fsdp
    import torch.nn.parallel
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    import everyrank.audit.watch.install
    import everyrank.benchmark.rank
    import everyrank.builtin.digits
    import everyrank.cli
    import everyrank.commands
    import everyrank.launch
    import everyrank.parity.rank
    import everyrank.prediction.rank
    import everyrank.strategies
    import everyrank.train.rank
    import zoo

    for package in (everyrank.commands, everyrank.launch, everyrank.strategies):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith((".ray_driver", ".ray_room")):
                importlib.import_module(module.name)
    assert all([torch, everyrank, zoo])
    # torchrun names the calling function in each of its records. So it searches all imported modules, which takes
    # a fifth of a core for each host while they wait for each other.
    dynamic_rendezvous.get_method_name = lambda depth=2: f"caller {depth}"


def _forget_finalizers() -> None:
    """Disable inherited finalizers. They would remove temporary folders of the parent process."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False


def _start(connection: socket.socket) -> int:
    """Fork the requested process, send its id, and return it. The process ends with its connection."""
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
    content = connection.recv(*struct.unpack("i", header), socket.MSG_WAITALL) if header else b""
    if not content:
        raise EOFError
    child = os.fork()
    if child == 0:
        connection.close()
        _run_request(content, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("i", child))
    return child


def _send_exit_statuses(started: dict[socket.socket, int]) -> None:
    """Send the exit status of each ended process to its connection."""
    while (pid_and_status := os.waitpid(-1, os.WNOHANG) if started else (0, 0)) != (0, 0):
        pid, status = pid_and_status
        (connection,) = (open_connection for open_connection, child in started.items() if child == pid)
        del started[connection]
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
        connection.close()


def _forward_signal_or_kill(connection: socket.socket, child: int) -> None:
    """Forward a signal whose number was received. If the connection was closed, kill the session."""
    message = b""
    with contextlib.suppress(OSError):
        message = connection.recv(1)
    if message:
        os.kill(child, message[0])
    else:
        _kill(child)


def _kill(child: int) -> None:
    """Kill the session of a process, and the process."""
    for kill_function in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill_function(child, signal.SIGKILL)


def _run_request(content: bytes, descriptors: Sequence[int]) -> NoReturn:
    """Become the requested process, and run its function."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    high_descriptors = [_duplicate_from(descriptor, 64 + len(descriptors)) for descriptor in descriptors]
    for target, descriptor in enumerate(high_descriptors):
        os.dup2(descriptor, target, inheritable=target < _STREAMS)
    _redirect_to_devnull(range(len(high_descriptors)))
    sys.stdin, sys.stdout, sys.stderr = _streams()
    try:
        function, arguments, folder, environment = pickle.loads(content)
        os.chdir(folder)
        multiprocessing.process.ORIGINAL_DIR = folder  # spawned processes search the script in this folder
        os.environ.clear()
        os.environ.update(environment)
        _mark(environment.get(MARK, _NO_MARK))
        _reset_signals()
    except BaseException:
        traceback.print_exc()
        os._exit(99)
    _end_with(globals()[function] if isinstance(function, str) else function, *arguments)


def _duplicate_from(descriptor: int, minimum: int) -> int:
    """Duplicate a descriptor to a number of at least `minimum`."""
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, minimum)


def _redirect_to_devnull(passed_descriptors: Sequence[int]) -> None:
    """Redirect each descriptor that an exec would close to /dev/null, except `passed_descriptors`.

    They stay open, because inherited objects may still close that number.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/dev/fd").iterdir()):
        descriptor = int(entry.name)
        with contextlib.suppress(OSError):
            if (
                descriptor not in passed_descriptors
                and descriptor != devnull
                and descriptor >= _STREAMS
                and not os.get_inheritable(descriptor)
            ):
                os.dup2(devnull, descriptor, inheritable=False)
    if devnull >= _STREAMS:
        os.close(devnull)


def _streams() -> Iterator[IO[str]]:
    """Yield stdin, stdout and stderr as an interpreter opens them. stderr is line-buffered."""
    for descriptor, mode in enumerate("rww"):
        buffering = 1 if descriptor == 2 else -1
        yield open(descriptor, mode, buffering, closefd=False)  # noqa: SIM115  (it stays open as long as the process)


def _reset_signals() -> None:
    """Reset signals as in a new process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_with(function: Callable[..., object], *arguments: object) -> NoReturn:
    """Call a function, then end as an interpreter does."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as exit_error:
        if isinstance(exit_error.code, str):
            print(exit_error.code, file=sys.stderr)
        status = exit_error.code if isinstance(exit_error.code, int) else int(exit_error.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        user_traceback = error.__traceback__
        while (
            user_traceback is not None
            and user_traceback.tb_frame.f_code.co_filename == __file__
            and user_traceback.tb_next is not None
        ):
            user_traceback = user_traceback.tb_next  # a new interpreter would not have the frames of this file
        sys.excepthook(type(error), error.with_traceback(user_traceback), user_traceback)
        status = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


# --- in the forked process


def run_python(args: list[str]) -> None:
    """Run `python *args`: `-m MODULE ...`, `-c CODE ...` or a script, after flags such as -P and -u."""
    while args and args[0] in ("-P", "-u", "-E", "-s"):
        args = args[1:]
    option, target, other_args = (args[0], args[1], args[2:]) if args[0] in ("-m", "-c") else ("", args[0], args[1:])
    sys.argv = [option or target, *other_args]
    sys.path.insert(0, str(Path.cwd() if option else Path(target).absolute().parent))
    if option == "-m":
        # the import hook of pytest has no get_code for runpy
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
        sys.modules.pop(target, None)  # runpy warns if the module is already imported
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif option == "-c":
        exec(compile(target, "<string>", "exec"), {"__name__": "__main__"})
    else:
        script = types.ModuleType("__main__")
        script.__file__ = target
        sys.modules["__main__"] = sys.modules["__mp_main__"] = script  # multiprocessing uses the second name
        exec(compile(Path(target).read_bytes(), target, "exec"), vars(script))


def _add_hooks() -> None:
    """Do what audit/watch/inject/sitecustomize.py does in a new process whose script imports torch."""
    from everyrank.audit.watch.install import install

    sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115  (PYTHONUNBUFFERED)
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = path
    for folder in path[1:]:
        file = Path(folder) / "sitecustomize.py"
        if file.is_file():
            exec(compile(file.read_text(), str(file), "exec"), {"__name__": "sitecustomize", "__file__": str(file)})
            break
    install()


def run_python_here(args: list[str], folder: str, passed_descriptors: Sequence[int] = ()) -> None:
    """Run `python *args` on the simulated host of the caller.

    After the streams, this process receives the caller's namespaces and then its open files. The open files get the
    numbers in `passed_descriptors`.
    """
    for descriptor, path in enumerate(_NAMESPACES, _STREAMS):
        if not os.path.sameopenfile(descriptor, current := os.open(path, os.O_RDONLY)) and _libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path} of the caller")
        os.close(descriptor)
        os.close(current)
    first_file = _STREAMS + len(_NAMESPACES)
    received_descriptors = range(first_file, first_file + len(passed_descriptors))
    high_descriptors = [_duplicate_from(descriptor, 512) for descriptor in received_descriptors]
    for descriptor in received_descriptors:
        os.close(descriptor)
    for source, descriptor in zip(high_descriptors, passed_descriptors, strict=True):
        os.dup2(source, descriptor, inheritable=False)
        os.close(source)
    os.chdir(folder)  # the mount namespace has changed, and entering it moved the process to its root
    _forget_tests()
    if "/audit/watch/inject" in os.environ.get("PYTHONPATH", ""):
        _add_hooks()
    run_python(args)


def _forget_tests() -> None:
    """Remove the modules of the tests, because an audit would take them for those of the script."""
    tests = str(Path(__file__).parent)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(tests):
            del sys.modules[name]


_Popen = subprocess.Popen


class _ForkingPopen(_Popen):
    """A Popen that forks `python -m everyrank...`, and starts any other command as usual.

    If a launcher (mpirun, srun, torchrun) starts such a command, it gets a `python` whose processes are forked.
    """

    address: str

    def _execute_child(self, *args: Any) -> None:
        call = inspect.signature(_Popen._execute_child).bind(self, *args).arguments
        command = [] if isinstance(call["args"], str | bytes) else list(map(os.fsdecode, call["args"]))
        if command and command[0] == sys.executable and AUDIT in (call["env"] or {}):
            call["args"] = [str(_programs(self.address) / "python"), *command[1:]]
            super()._execute_child(*list(call.values())[1:])
            return
        if not command or not _is_forked(command) or len(list(Path("/proc/self/task").iterdir())) > 1:
            index = next((index for index in range(len(command)) if _is_forked(command[index:])), None)
            if index is not None and call["executable"] is None:
                command[index] = str(_programs(self.address) / "python")
                call["args"] = command
            super()._execute_child(*list(call.values())[1:])
            return
        pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # the child would write buffered text again
        self.pid = os.fork()
        if self.pid == 0:
            _run_popen_command(call, [pipes[0], pipes[3], pipes[5]])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _is_forked(command: list[str]) -> bool:
    """Return whether this command is `python -m everyrank...` or torchrun."""
    is_known_module = re.match(r"(-\S+ )*-m (everyrank|torch\.distributed\.run)\b", " ".join(command[1:])) is not None
    return is_known_module and command[0] == sys.executable


def _run_popen_command(call: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the command of a Popen call, in the child of a process that was forked itself."""
    gc.freeze()
    _forget_finalizers()
    if call["start_new_session"]:
        os.setsid()
    descriptors = [index if descriptor == -1 else descriptor for index, descriptor in enumerate(streams)]
    high_descriptors = [_duplicate_from(descriptor, 64) for descriptor in descriptors]
    for target, descriptor in enumerate(high_descriptors):
        os.dup2(descriptor, target)
    sys.stdin, sys.stdout, sys.stderr = _streams()
    _redirect_to_devnull(call["pass_fds"])
    if call["cwd"] is not None:
        os.chdir(call["cwd"])
    if call["env"] is not None:
        environment = dict(call["env"])
        os.environ.clear()
        os.environ.update(environment)
    _reset_signals()
    _end_with(run_python, list(map(os.fsdecode, call["args"]))[1:])


_spawn = multiprocessing.util.spawnv_passfds


def _spawnv_passfds(path: bytes, args: Sequence[str | bytes], passed_descriptors: Sequence[int]) -> int:
    """Fork a process of `multiprocessing`, if this process has one thread. Start any other program as usual."""
    code = os.fsdecode(args[-2])
    if "import spawn_main" in code and AUDIT in os.environ:  # a new process installs its own hooks
        program = os.fsencode(_programs(_ForkingPopen.address) / "python")
        open_option = "--open=" + ",".join(map(str, passed_descriptors))
        return _spawn(
            program, [program, os.fsencode(open_option), b"-c", os.fsencode(code), args[-1]], passed_descriptors
        )
    if "import spawn_main" not in code or len(list(Path("/proc/self/task").iterdir())) > 1:
        return _spawn(path, args, passed_descriptors)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # the child would write buffered text again
    child = os.fork()
    if child == 0:
        sys.stdin, sys.stdout, sys.stderr = _streams()
        _redirect_to_devnull(list(passed_descriptors))
        sys.modules["__main__"] = types.ModuleType("__main__")
        _forget_finalizers()
        _reset_signals()
        _end_with(run_python, ["-c", code, os.fsdecode(args[-1])])
    return child


# --- the mark

# The address of the mark. /proc/ID/environ shows the memory of the initial environment of the server.
_libc = ctypes.CDLL(None, use_errno=True)
_getenv = _libc.getenv
_getenv.restype = ctypes.c_void_p
_MARK_ADDRESS: int | None = _getenv(MARK.encode()) if os.environ.get(MARK) == _NO_MARK else None


def _mark(mark: str) -> None:
    """Show a mark in /proc/ID/environ, as if the process had started with it."""
    assert len(mark) == len(_NO_MARK), f"{MARK} has {len(_NO_MARK)} letters"
    assert _MARK_ADDRESS is not None
    ctypes.memmove(_MARK_ADDRESS, mark.encode(), len(mark))
