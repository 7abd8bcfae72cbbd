"""One process that has imported everything forks what the tests start: ranks, command lines, scripts.

A start of Python costs four to seven CPU seconds of imports here, a fork some milliseconds. What is forked is a process
like any other: with an id, a session, standard streams, an environment, a working directory and an exit status of its
own, and it can be killed. Where it starts the ranks of a job in turn (`python -m everyrank...`), these are forked, too.

Not the same: `/proc/ID/cmdline` is the server's, modules that the tests have not imported yet are there already,
and `gc.unfreeze` does nothing. A handful of tests therefore starts Python itself, from end to end: `is_forked=False`.
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

# `python` and `torchrun` for a shell: their words, files and environment go to the server, their signals follow.
# `--open=5,7` passes further open files, under the same numbers.
PROGRAM = """\
#!{python} -ES
import os, pickle, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words, kept = {before!r} + sys.argv[1:], []
if words and words[0].startswith("--open="):
    kept = list(map(int, words.pop(0)[7:].split(",")))
content = pickle.dumps(("run_python_here", (words, os.getcwd(), kept), os.getcwd(), dict(os.environ)))
here = [os.open(path, os.O_RDONLY) for path in {namespaces!r}]
socket.send_fds(server, [struct.pack("i", len(content))], [0, 1, 2, *here, *kept])
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
AUDIT = "EVERYRANK_AUDIT"  # the hooks' settings, in the environment of a script that is audited
MARK = "EVERYRANK_TEST_MARK"  # finds, in /proc, every process that a test has started
_NO_MARK = "-" * 32
_STREAMS = 3
# a host of its own: its devices and addresses, its name, and /sys as it looks from there (Linux)
_NAMESPACES = [path for path in ("/proc/self/ns/net", "/proc/self/ns/uts", "/proc/self/ns/mnt") if os.path.exists(path)]  # noqa: PTH110


# --- in the tests


class Forked:
    """A process that the server has forked for us, as `subprocess.Popen` has it. Who lets go of it ends it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        # not in __del__: of garbage in a circle the socket may go first, and Python warns that it was open
        weakref.finalize(self, connection.close)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        text = self.connection.recv(4, socket.MSG_WAITALL)
        if len(text) < 4:
            raise RuntimeError("the fork server is gone")
        return struct.unpack("i", text)[0]

    def poll(self) -> int | None:
        """The exit status, -N after signal N; None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.returncode = self._number()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None and not select.select([self.connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """SIGKILL, to it alone."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """End it and its session, if they still run."""
        self.connection.close()


class ForkServer:
    """Starts when it is first asked for something.

    preload   what it imports: "all" that tests need, or "torch" alone, so that a script finds nothing there that it
              has not imported itself
    """

    def __init__(self, preload: str = "all") -> None:
        self.preload = preload
        self.folder = Path(tempfile.mkdtemp(prefix="everyrank-fork-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.torch: ForkServer | None = None

    def _serve(self) -> None:
        if self.process is not None:
            return
        # one thread, so that none is lost in a fork; the mark's place is filled by whom it marks
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", MARK: _NO_MARK}
        code = "import forkserver, sys; forkserver.serve(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, self.address, self.preload],
            stdin=subprocess.PIPE,  # at whose end it ends
            env={**_child_environment(), **own},  # torch reads its log level once, when it is imported
            start_new_session=True,
        )
        while not Path(self.address).exists():
            assert self.process.poll() is None, "the fork server could not start"
            time.sleep(0.01)
        folder = _programs(self.address)
        folder.mkdir()
        for name, before in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
            own = {"address": self.address, "before": before, "namespaces": _NAMESPACES}
            (folder / name).write_text(PROGRAM.format(python=sys.executable, **own))
            (folder / name).chmod(0o755)

    @property
    def programs(self) -> Path:
        """A folder with `python` and `torchrun`, whose processes are forked."""
        self._serve()
        return _programs(self.address)

    @property
    def torch_programs(self) -> Path:
        """`python` and `torchrun` with only torch imported: a forgotten import fails as it does for a user."""
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
        """Call a function of a module in a new process; its descriptors from 3 on are `handles`.

        Of `streams` (stdin, stdout, stderr) None is nothing at all for the first, and ours for the others.
        """
        self._serve()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        request = (function, arguments, str(folder or Path.cwd()), dict(environment or os.environ))
        with Path(os.devnull).open("rb") as nothing:
            chosen = [nothing if stream is None and not place else stream for place, stream in enumerate(streams)]
            numbers = [place if stream is None else _fileno(stream) for place, stream in enumerate(chosen)]
            send_request(connection, request, [*numbers, *handles])
        return Forked(connection)

    def start(
        self,
        folder: Path,
        *words: object,
        streams: Sequence[IO[Any] | int | None] = (None, None, None),
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """`python *words`, without the seconds of its start."""
        return self.fork(run_python, list(map(str, words)), folder=folder, environment=environment, streams=streams)

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


def send_request(connection: socket.socket, request: object, numbers: Sequence[int]) -> None:
    """With open files, whose numbers are these."""
    content = pickle.dumps(request)
    socket.send_fds(connection, [struct.pack("i", len(content))], numbers)
    connection.sendall(content)


# --- in the server


def serve(address: str, preload: str) -> None:
    """Import what the tests need, then fork until standard input ends."""
    _ForkingPopen.address = address
    subprocess.Popen = _ForkingPopen  # before torchrun's agent is imported, which keeps it
    importlib.import_module("torch")
    if preload == "all":
        _preload()
    _forget_finalizers()  # torch's, of its libraries: each process would take them down at its end
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # the pages of what is there by now stay shared,
    gc.unfreeze = lambda: None  # at the end of a world, too: to look through all of it took most of a short run's time
    multiprocessing.util.spawnv_passfds = _spawnv_passfds
    started: dict[socket.socket, int] = {}  # the process that was asked for over this connection, as long as it runs
    a_child_ended, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address + ".new")
        listening.listen(64)
        Path(address + ".new").rename(address)
        while True:
            ready, _, _ = select.select([listening, 0, a_child_ended, *started], [], [])
            if 0 in ready:
                break
            if a_child_ended in ready:
                os.read(a_child_ended, 4096)
                _tell_ended(started)
            for connection in started.keys() & set(ready):
                _obey(connection, started[connection])
            if listening in ready:
                connection, _ = listening.accept()
                with contextlib.suppress(EOFError):
                    started[connection] = _start(connection)
    for child in started.values():
        _kill(child)
    with contextlib.suppress(ChildProcessError):  # so that what they have used is counted
        while True:
            os.wait()


def _preload() -> None:
    import pkgutil

    import torch.distributed.checkpoint
    import torch.distributed.elastic.multiprocessing
    import torch.distributed.fsdp
    import torch.nn.parallel

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


def _forget_finalizers() -> None:
    """What is to be tidied up is not ours: a temporary folder of whom we are forked from."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False


def _start(connection: socket.socket) -> int:
    """Fork the process that is asked for, and tell its id. It ends with whoever asked for it."""
    first, numbers, _, _ = socket.recv_fds(connection, 4, 64)
    content = connection.recv(*struct.unpack("i", first), socket.MSG_WAITALL) if first else b""
    if not content:
        raise EOFError
    child = os.fork()
    if child == 0:
        connection.close()
        _begin(content, numbers)
    for number in numbers:
        os.close(number)
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("i", child))
    return child


def _tell_ended(started: dict[socket.socket, int]) -> None:
    """How each process ended that has, to whoever asked for it."""
    while (ended := os.waitpid(-1, os.WNOHANG) if started else (0, 0)) != (0, 0):
        (connection,) = (one for one, child in started.items() if child == ended[0])
        del started[connection]
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(ended[1])))
        connection.close()


def _obey(connection: socket.socket, child: int) -> None:
    """Pass on a signal that is asked for by its number; end the session when nobody asks any more."""
    number = b""
    with contextlib.suppress(OSError):
        number = connection.recv(1)
    if number:
        os.kill(child, number[0])
    else:
        _kill(child)


def _kill(child: int) -> None:
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(child, signal.SIGKILL)


def _begin(content: bytes, numbers: Sequence[int]) -> NoReturn:
    """Become the process that was asked for."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    high = [_above(number, 64 + len(numbers)) for number in numbers]
    for place, number in enumerate(high):
        os.dup2(number, place, inheritable=place < _STREAMS)
    _let_go(range(len(high)))
    sys.stdin, sys.stdout, sys.stderr = _streams()
    try:
        function, arguments, folder, environment = pickle.loads(content)
        os.chdir(folder)
        multiprocessing.process.ORIGINAL_DIR = folder  # where what is spawned looks for the script
        os.environ.clear()
        os.environ.update(environment)
        _mark(environment.get(MARK, _NO_MARK))
        _settle()
    except BaseException:
        traceback.print_exc()
        os._exit(99)
    _end_with(globals()[function] if isinstance(function, str) else function, *arguments)


def _above(number: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least)


def _let_go(kept: Sequence[int]) -> None:
    """Point every descriptor that an exec would close at nothing: the parent's objects may still close that number."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/dev/fd").iterdir()):
        number = int(entry.name)
        with contextlib.suppress(OSError):
            if number not in kept and number != nothing and number >= _STREAMS and not os.get_inheritable(number):
                os.dup2(nothing, number, inheritable=False)
    if nothing >= _STREAMS:
        os.close(nothing)


def _streams() -> Iterator[IO[str]]:
    """As an interpreter makes them: what stderr is told is seen at once."""
    for number, mode in enumerate("rww"):
        buffering = 1 if number == 2 else -1
        yield open(number, mode, buffering, closefd=False)  # noqa: SIM115  (stays open as long as the process)


def _settle() -> None:
    """Signals as they are in a new process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_with(function: Callable[..., object], *arguments: object) -> NoReturn:
    """Call it, and end as an interpreter ends after it."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__ and frames.tb_next is not None:
            frames = frames.tb_next  # a new interpreter has no such frames
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        status = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


# --- what a process that was forked does


def run_python(words: list[str]) -> None:
    """What `python *words` does: `-m MODULE ...`, `-c CODE ...` or a script, after -P, -u and their like."""
    while words and words[0] in ("-P", "-u", "-E", "-s"):
        words = words[1:]
    kind, name, rest = (words[0], words[1], words[2:]) if words[0] in ("-m", "-c") else ("", words[0], words[1:])
    sys.argv = [kind or name, *rest]
    sys.path.insert(0, str(Path.cwd() if kind else Path(name).absolute().parent))
    if kind == "-m":
        # pytest's loader of this process has no code for runpy
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
        sys.modules.pop(name, None)  # runpy warns of a module that is there already
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    else:
        script = types.ModuleType("__main__")
        script.__file__ = name
        sys.modules["__main__"] = sys.modules["__mp_main__"] = script  # the second is what multiprocessing calls it
        exec(compile(Path(name).read_bytes(), name, "exec"), vars(script))


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


def run_python_here(words: list[str], folder: str, kept: Sequence[int] = ()) -> None:
    """The same on the host of the caller: its namespaces, then its files `kept`, are open after the streams."""
    for number, path in enumerate(_NAMESPACES, _STREAMS):
        if not os.path.sameopenfile(number, own := os.open(path, os.O_RDONLY)) and _libc.setns(number, 0):
            raise OSError(ctypes.get_errno(), f"{path} of who asks cannot be entered")
        os.close(number)
        os.close(own)
    first = _STREAMS + len(_NAMESPACES)
    high = [_above(number, 512) for number in range(first, first + len(kept))]
    for number in range(first, first + len(kept)):
        os.close(number)
    for source, number in zip(high, kept, strict=True):
        os.dup2(source, number, inheritable=False)
        os.close(source)
    os.chdir(folder)  # another /sys is another tree of files, and begins at its root
    _forget_tests()
    if "/audit/watch/inject" in os.environ.get("PYTHONPATH", ""):
        _add_hooks()
    run_python(words)


def _forget_tests() -> None:
    """Let a script find no modules of the tests: an audit would take them for the script's own."""
    tests = str(Path(__file__).parent)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(tests):
            del sys.modules[name]


_Popen = subprocess.Popen


class _ForkingPopen(_Popen):
    """Forks where `python -m everyrank...` would be started; starts everything else as ever.

    A launcher (mpirun, srun, torchrun) that is told to start that gets a `python` whose processes are forked.
    """

    address: str

    def _execute_child(self, *arguments: Any) -> None:
        call = inspect.signature(_Popen._execute_child).bind(self, *arguments).arguments
        words = [] if isinstance(call["args"], str | bytes) else list(map(os.fsdecode, call["args"]))
        if words and words[0] == sys.executable and AUDIT in (call["env"] or {}):
            call["args"] = [str(_programs(self.address) / "python"), *words[1:]]
            super()._execute_child(*list(call.values())[1:])
            return
        if not words or not _is_forked(words) or len(list(Path("/proc/self/task").iterdir())) > 1:
            place = next((place for place in range(len(words)) if _is_forked(words[place:])), None)
            if place is not None and call["executable"] is None:
                words[place] = str(_programs(self.address) / "python")
                call["args"] = words
            super()._execute_child(*list(call.values())[1:])
            return
        pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # not twice
        self.pid = os.fork()
        if self.pid == 0:
            _begin_again(call, [pipes[0], pipes[3], pipes[5]])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _is_forked(words: list[str]) -> bool:
    """Whether these are words of `python -m everyrank...`, or of torchrun."""
    is_ours = re.match(r"(-\S+ )*-m (everyrank|torch\.distributed\.run)\b", " ".join(words[1:])) is not None
    return is_ours and words[0] == sys.executable


def _begin_again(call: dict[str, Any], streams: list[int]) -> NoReturn:
    """In the child of a process that was forked itself."""
    gc.freeze()
    _forget_finalizers()
    if call["start_new_session"]:
        os.setsid()
    high = [place if number == -1 else number for place, number in enumerate(streams)]
    high = [_above(number, 64) for number in high]
    for place, number in enumerate(high):
        os.dup2(number, place)
    sys.stdin, sys.stdout, sys.stderr = _streams()
    _let_go(call["pass_fds"])
    if call["cwd"] is not None:
        os.chdir(call["cwd"])
    if call["env"] is not None:
        environment = dict(call["env"])
        os.environ.clear()
        os.environ.update(environment)
    _settle()
    _end_with(run_python, list(map(os.fsdecode, call["args"]))[1:])


_spawn = multiprocessing.util.spawnv_passfds


def _spawnv_passfds(path: bytes, words: Sequence[str | bytes], kept: Sequence[int]) -> int:
    """Fork what `multiprocessing` spawns, from a process without threads; start everything else as ever."""
    code = os.fsdecode(words[-2])
    if "import spawn_main" in code and AUDIT in os.environ:  # a new process has hooks of its own
        program = os.fsencode(_programs(_ForkingPopen.address) / "python")
        opened = "--open=" + ",".join(map(str, kept))
        return _spawn(program, [program, os.fsencode(opened), b"-c", os.fsencode(code), words[-1]], kept)
    if "import spawn_main" not in code or len(list(Path("/proc/self/task").iterdir())) > 1:
        return _spawn(path, words, kept)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # not twice
    child = os.fork()
    if child == 0:
        sys.stdin, sys.stdout, sys.stderr = _streams()
        _let_go(list(kept))
        sys.modules["__main__"] = types.ModuleType("__main__")
        _forget_finalizers()
        _settle()
        _end_with(run_python, ["-c", code, os.fsdecode(words[-1])])
    return child


# --- the mark

# Where the mark is in memory: /proc/ID/environ shows the environment as it lay there when the server was started.
_libc = ctypes.CDLL(None, use_errno=True)
_getenv = _libc.getenv
_getenv.restype = ctypes.c_void_p
_MARK_PLACE: int | None = _getenv(MARK.encode()) if os.environ.get(MARK) == _NO_MARK else None


def _mark(mark: str) -> None:
    """Show a mark in /proc/ID/environ, as a process does that was started with it."""
    assert len(mark) == len(_NO_MARK), f"{MARK} has {len(_NO_MARK)} letters"
    assert _MARK_PLACE is not None
    ctypes.memmove(_MARK_PLACE, mark.encode(), len(mark))
