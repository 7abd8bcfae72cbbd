"""Writes the state of this rank for the autopsy, and prints the autopsy when the rank waits for others for too long.

`python -P -m everyrank.script.watching TIMEOUT FOLDER|- SCRIPT [ARGUMENTS ...]`

The script is not changed: a thread records twice a second where the main thread is, and torch's Flight Recorder
records the collectives. The watch never ends a program.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import psutil

from everyrank.errors import EveryrankError, describe, printable
from everyrank.launch import RankInfo, rank_info_from_environment
from everyrank.launch.autopsy import RankState, current_state, hang_autopsy, keep_state, last_words
from everyrank.launch.autopsy.rank_state import forget_hang, report_hang
from everyrank.launch.host_info import boot_id
from everyrank.launch.rank_info import START_VARIABLES, is_loopback_host, launcher_process
from everyrank.script.command import read_command

__all__ = ["TIMEOUT_SECONDS", "watch", "watch_process", "watch_root"]

TIMEOUT_SECONDS = 300.0
_KEPT_CALLS = "256"  # length of the Flight Recorder's ring; a dump takes 1 ms for each 100 calls
_IDLE_SHARE = 0.1  # of a core: a rank that uses less is waiting
_DAYS_KEPT = 7
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def watch(info: RankInfo, timeout_seconds: float) -> None:
    """Watch this rank of everyrank."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT_CALLS)
    state = current_state()
    if state is None or info.started_by == "ray":  # the ranks of a host have no common folder under Ray
        # each rank has a supervisor of its own as its parent
        run = _run(os.environ, info.rank, info.size, info.local_size == info.size, has_common_parent=False)
        try:
            state = keep_state(watch_root() / run.key, run.rank, run.size, run.key, run.is_unique)
        except OSError as error:
            _print_not_watched(error)
    if state is not None:
        _prepare(state, timeout_seconds, prints=info.started_by == "ray")


def watch_process(timeout_seconds: float = TIMEOUT_SECONDS, folder: Path | None = None) -> None:
    """Watch this process of any launcher, or one that will call `init_process_group` itself.

    folder   folder for the files of the ranks; all hosts must share it. None: a folder below /tmp, or for ranks on
             several hosts below `~/.cache/everyrank`, because clusters share home directories
    """
    if current_state() is not None:  # a rank of everyrank
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT_CALLS)
    _forward_exceptions()
    run = _run_from_environment(os.environ)
    if run is not None:
        _start(run, timeout_seconds, folder)
    else:
        _listen_for_signal()
        thread = threading.Thread(target=_wait_for_group, args=(timeout_seconds, folder), daemon=True)
        thread.start()


def watch_root(is_one_host: bool = True) -> Path:
    """Return the folder below which watched ranks write their files; only this user can open it. Raises `OSError`."""
    if is_one_host:
        root = Path(tempfile.gettempdir()) / f"everyrank-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            raise PermissionError(f"{root} belongs to another user; set TMPDIR to your own folder")
    else:
        root = Path.home() / ".cache" / "everyrank"
    return root / "watch"


# --- the run of this process


class _Run(NamedTuple):
    """The rank of this process, the number of ranks, and a key that all ranks of this start have.

    is_unique   whether no later start can have the same key
    """

    rank: int
    size: int
    key: str
    is_one_host: bool = True
    is_unique: bool = True


def _run_from_environment(environment: Mapping[str, str]) -> _Run | None:
    with contextlib.suppress(EveryrankError, OSError):
        info = rank_info_from_environment(environment)
        if info is not None:
            # a user may start ranks one by one, each from a different shell
            has_common_parent = info.started_by != "env"
            return _run(environment, info.rank, info.size, info.local_size == info.size, has_common_parent)
    with contextlib.suppress(KeyError, ValueError):  # deepspeed sets no LOCAL_WORLD_SIZE
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        is_one_host = int(environment.get("LOCAL_SIZE", "0")) == size or is_loopback_host(
            environment.get("MASTER_ADDR", "")
        )
        has_common_parent = not environment.get("MASTER_PORT")
        return _run(environment, rank, size, is_one_host, has_common_parent) if 0 <= rank < size else None
    return None


_LAUNCHER_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _run(environment: Mapping[str, str], rank: int, size: int, is_one_host: bool, has_common_parent: bool) -> _Run:
    """Return the run whose key comes from the variables of the launcher, and from its process if that is on this host.

    has_common_parent   whether the same process of this host has started all its ranks
    """
    values = [environment.get(name, "") for name in _LAUNCHER_VARIABLES + START_VARIABLES]
    if not is_one_host:
        values.append(_hydra_address())
    else:
        values.append(launcher_process(environment) if has_common_parent else boot_id())
    return _Run(rank, size, _key(values), is_one_host, is_unique=is_one_host and has_common_parent)


def _run_of_group(dist: Any) -> _Run:
    """Return the run of ranks that have called `init_process_group`. All know the same address of their store."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    rank, size = dist.get_rank(), dist.get_world_size()
    host, path = getattr(store, "host", ""), getattr(store, "path", "")  # of a TCPStore or a FileStore
    if not host and not path:
        return _run({**os.environ, "RANK": ""}, rank, size, is_one_host=True, has_common_parent=True)
    is_one_host = is_loopback_host(host)
    address = f"{host}:{store.port}" if host else str(path)
    return _Run(rank, size, _key([address, boot_id() if is_one_host else ""]), is_one_host, is_unique=False)


def _key(values: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:16]


def _hydra_address() -> str:
    """Return the address of mpiexec (MPICH), which its process on each host has as an argument; "" if there is none."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            command = process.cmdline()
            if "--control-port" in command[:-1]:
                return command[command.index("--control-port") + 1]
    return ""


# --- the watch


def _start(run: _Run, timeout_seconds: float, folder: Path | None) -> None:
    try:
        root = folder.absolute() if folder is not None else watch_root(run.is_one_host)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder is None:
            _delete_old_folders(root)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
        _print_not_watched(error)
        return
    state = keep_state(root / run.key, run.rank, run.size, run.key, run.is_unique)
    if state is not None:
        atexit.register(state.end)
        _prepare(state, timeout_seconds, prints=True)


def _print_not_watched(error: Exception) -> None:
    print(f"everyrank: not watched: {printable(str(error))}", file=sys.stderr)


def _wait_for_group(timeout_seconds: float, folder: Path | None) -> None:
    """Start the watch after the script has called `init_process_group`, because only then the rank is known."""
    while True:
        time.sleep(0.25)
        dist = sys.modules.get("torch.distributed")
        with contextlib.suppress(Exception):
            if dist is not None and dist.is_initialized():
                _start(_run_of_group(dist), timeout_seconds, folder)
                return


def _prepare(state: RankState, timeout_seconds: float, prints: bool) -> None:
    state.calls = _recorded_calls
    signal_pipe = _listen_for_signal()
    hang_watch = _HangWatch(state, timeout_seconds, prints)

    def check_and_answer(frames: list[tuple[str, int, str]]) -> None:
        hang_watch.check(frames)
        if signal_pipe is not None and _was_requested(signal_pipe):
            threading.Thread(target=_print_autopsy, args=(state.folder,), daemon=True).start()

    state.on_sample = check_and_answer
    _record_exit(state)


def _record_exit(state: RankState) -> None:
    """Record where this process calls `os._exit`, which leaves no traceback."""
    exit_now, pid = os._exit, os.getpid()

    def record_and_exit(status: int) -> NoReturn:
        if os.getpid() == pid:  # not in a fork, such as a data loader worker
            with contextlib.suppress(Exception):
                state.write_stack_now()
        exit_now(status)

    os._exit = record_and_exit


def _recorded_calls(with_locations: bool) -> dict[str, Any]:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not getattr(dist, "is_initialized", lambda: False)():
        return {}
    from everyrank.world.calls import recorded_calls

    return recorded_calls(with_locations)


class _HangWatch:
    """Notices that the main thread has waited at the same line for `timeout_seconds` without computing."""

    def __init__(self, state: RankState, timeout_seconds: float, prints: bool) -> None:
        self.state, self.timeout_seconds, self.prints = state, timeout_seconds, prints
        self.job = state.job
        self.frames: list[tuple[str, int, str]] = []
        self.since, self.cpu_since, self.is_reported = time.monotonic(), time.process_time(), False

    def check(self, frames: list[tuple[str, int, str]]) -> None:
        frames = _without_polling(frames)
        if frames != self.frames:
            if self.is_reported:
                forget_hang(self.state.folder, self.job)
            self.frames, self.is_reported = frames, False
            self.since, self.cpu_since = time.monotonic(), time.process_time()
            return
        seconds = time.monotonic() - self.since
        if self.is_reported or not frames or seconds < self.timeout_seconds:
            return
        if self._computes(seconds):
            self.since, self.cpu_since = time.monotonic(), time.process_time()
            return
        self.is_reported = True
        # in another thread, because this thread has to answer the autopsy
        threading.Thread(target=self._report, daemon=True).start()

    def _computes(self, seconds: float) -> bool:
        is_busy = time.process_time() - self.cpu_since > _IDLE_SHARE * seconds
        calls = self.state.calls(False).get("calls", []) if is_busy else []
        return is_busy and all(call[5] for call in calls)

    def _report(self) -> None:
        def text() -> str:
            autopsy = hang_autopsy(self.state.folder) or "no rank has written its state"
            return f"rank {self.state.rank} has waited for {self.timeout_seconds:g} s (--timeout): {autopsy}"

        report = report_hang(self.state.folder, self.job, text)
        if report is not None and self.prints:
            print(f"everyrank: {printable(report)}", file=sys.stderr, flush=True)


def _without_polling(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Return the frames without the innermost ones in Python's library, which may loop over short waits."""
    for index, (file, _, _) in enumerate(frames):
        is_polling = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        if not is_polling and not file.endswith("torch/utils/data/dataloader.py"):
            return frames[index:]
    return frames


# --- on request


def _print_autopsy(folder: Path) -> None:
    text = hang_autopsy(folder) or "no rank has written its state yet"
    print(f"everyrank: autopsy: {printable(text)}", file=sys.stderr, flush=True)


_SIGNAL_PIPES: list[int] = []


def _listen_for_signal() -> int | None:
    """Return a pipe that receives SIGUSR2 even while C code blocks the main thread; None if the script uses SIGUSR2."""
    if _SIGNAL_PIPES:
        return _SIGNAL_PIPES[0]
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
        return None
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    previous_pipe = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if previous_pipe != -1:  # used by asyncio or the script
        signal.set_wakeup_fd(previous_pipe)
        return None
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)
    _SIGNAL_PIPES.append(read_end)
    return read_end


def _was_requested(read_end: int) -> bool:
    with contextlib.suppress(OSError):
        return signal.SIGUSR2 in os.read(read_end, 4096)
    return False


# --- the end of the process


def _forward_exceptions() -> None:
    """Record the exception that ends the script. If the script waited for other ranks, also print the autopsy."""
    previous_hook = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        state = current_state()
        if state is not None:
            atexit.unregister(state.end)
            autopsy = last_words(error)
            if autopsy:
                message = f"everyrank: rank {state.rank}: {describe(error)}; autopsy: {autopsy}"
                print(printable(message), file=sys.stderr, flush=True)

    sys.excepthook = record


def _delete_old_folders(root: Path) -> None:
    """Delete folders in which no rank has written for some days. A rank that runs writes twice a second."""
    for folder in root.iterdir():
        with contextlib.suppress(OSError):
            last_write = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if last_write < time.time() - 86_400 * _DAYS_KEPT:
                shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str]) -> None:
    """Run a script in this process and watch it."""
    timeout_seconds, folder, *script = argv
    command = read_command(script)
    watch_process(float(timeout_seconds), None if folder == "-" else Path(folder))
    command.run()


if __name__ == "__main__":
    main(sys.argv[1:])
