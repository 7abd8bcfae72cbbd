"""Fixtures for all tests. `ranks`, `cli` and `python` start processes; tests/README.md shows which one a test takes."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import everyrank.audit.start
import everyrank.rerun.host
from everyrank.launch.monitor import ProcessMonitor, _child_environment
from forkserver import ForkServer
from processes import Cli, Pool

os.environ.pop("PYTEST_ADDOPTS", None)  # this run has read it; a pytest that a test starts is another one
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait take the cores of other tests
# where bytecode is not kept, each of some thousand processes compiles what it imports
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_STARTED_FROM_OUTSIDE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_finish() -> None:
    """What is loaded by now stays: searching it for garbage takes a tenth of the time of a process that waits."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Pool]]:
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_server: ForkServer, _pools: dict[int, Pool]) -> Any:
    """`ranks(n, function, *arguments)`: results of `function(world, *arguments)` by rank.

    The processes are kept for the whole run; `is_new=True` takes new ones for a call. They meet over a file, so no port
    is opened. A call that takes too long fails with the stack of every rank; an exception in a rank is raised here with
    its traceback.
    """

    def call(count: int, function: Any, *arguments: Any, timeout: float = 200.0, is_new: bool = False) -> list[Any]:
        if is_new:
            with contextlib.closing(Pool(_server, count)) as pool:
                return pool.call(function, arguments, timeout)
        if count not in _pools:
            _pools[count] = Pool(_server, count)
        try:
            return _pools[count].call(function, arguments, timeout)
        except BaseException:
            _pools.pop(count).close()
            raise

    return call


@pytest.fixture(scope="session")
def cli(_server: ForkServer) -> Cli:
    """The command line: `cli(folder, "train", ...)`, `cli.start(folder, ...)`, `cli.on_ranks(folder, ..., size=2)`."""
    return Cli(_server)


@pytest.fixture(scope="session")
def python(_server: ForkServer) -> ForkServer:
    """Python processes that are forked: `python.fork(function)`, `python.start(folder, script)`, `python.programs`.

    The ranks that the test itself starts with `run_ranks` are forked, too, and also its scripts.
    """
    return _server


@pytest.fixture(autouse=True)
def _commands_end(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cli" in request.fixturenames:
        request.getfixturevalue("cli").close()


@pytest.fixture(autouse=True)
def _ranks_are_forked(request: pytest.FixtureRequest, _server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks that a test starts with `run_ranks` itself, if it asks for `python`."""
    if "python" not in request.fixturenames:
        return
    start = ProcessMonitor._start

    def fork(monitor: ProcessMonitor, command: list[str]) -> Any:
        if command[0] != sys.executable:
            return start(monitor, command)
        streams = (None, None, monitor.launcher_log)
        return _server.start(Path.cwd(), *command[1:], streams=streams, environment=_child_environment())

    monkeypatch.setattr(ProcessMonitor, "_start", fork)


@pytest.fixture(autouse=True, scope="session")
def _scripts_are_forked(_server: ForkServer) -> Iterator[None]:
    """Fork the scripts that a test starts with `audit_script` or `ScriptHost` itself."""
    interpreter = _Interpreter(_server)
    with pytest.MonkeyPatch.context() as patch:
        for module in (everyrank.audit.start, everyrank.rerun.host):
            patch.setattr(module, "sys", interpreter)
        yield


class _Interpreter:
    """The part of `sys` that starts a script. The fork server starts when it is first asked."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server

    @property
    def executable(self) -> str:
        return str(self.server.programs / "python")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks environment variables or a process group into the next one."""
    before = dict(os.environ)
    yield
    changed = {key for key in before.keys() | os.environ.keys() if before.get(key) != os.environ.get(key)}
    # torch sets its cache folder itself when an optimizer is first built
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    if "torch" in sys.modules:
        import torch.distributed as dist

        assert not dist.is_initialized(), "the test left a process group open"


@pytest.fixture(autouse=True, scope="session")
def _not_a_rank() -> None:
    """The tests start ranks of their own; a variable of somebody else's launcher would mislead them."""
    found = [name for name in _STARTED_FROM_OUTSIDE if name in os.environ]
    assert not found, f"unset {', '.join(found)} before running the tests"


@pytest.fixture(autouse=True, scope="session")
def _as_batch_jobs() -> None:
    """Nobody is preempted by whom it wakes up: gloo's threads spin as long as the one that sends holds their lock.

    With four ranks on two cores that is a third of all time.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux; what is started from here inherits it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(autouse=True, scope="session")
def _as_in_the_foreground() -> None:
    """A shell that runs the tests in its background ignores Ctrl-C for them, and nohup ignores SIGHUP.

    All that they start would, too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder of the checkout."""
    return Path(__file__).parents[1]
