"""Fixtures for all tests. `ranks`, `cli` and `python` start processes. tests/README.md shows which one to use."""

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
from processes import Cli, Pool, open_pools

os.environ.pop(
    "PYTEST_ADDOPTS", None
)  # this pytest has read it already; the tests start other pytests, which must not read it
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads would otherwise spin on the cores of other tests
# without cached bytecode, each of some thousand processes would compile the modules that it imports
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_finish() -> None:
    """Exclude all loaded objects from garbage collection.

    They stay for the whole run. Searching them takes a tenth of the time of a process that waits.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _server() -> Iterator[ForkServer]:
    """Yield the fork server of this run."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Pool]]:
    """Yield the pools of ranks by their number of ranks."""
    with open_pools() as pools:
        yield pools


@pytest.fixture
def ranks(_server: ForkServer, _pools: dict[int, Pool]) -> Any:
    """Return a function. `ranks(n, function, *arguments)` returns `function(world, *arguments)` of each rank.

    The processes are kept for the whole run. `is_new=True` starts new processes for one call. Their rendezvous is a
    file, so no port is opened. A call that takes too long fails with the stack of every rank. An exception in a rank
    fails the call with its traceback.
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
    """Return the command line of everyrank.

    Examples: `cli(folder, "train", ...)`, `cli.start(folder, ...)` and `cli.on_ranks(folder, ..., size=2)`.
    """
    return Cli(_server)


@pytest.fixture(scope="session")
def python(_server: ForkServer) -> ForkServer:
    """Return the fork server: `python.fork(function)`, `python.start(folder, script)`, `python.programs`.

    If a test itself calls `run_ranks`, the ranks are forked too. So are its scripts.
    """
    return _server


@pytest.fixture(autouse=True)
def _end_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kill the commands that a test has started with `cli`."""
    yield
    if "cli" in request.fixturenames:
        request.getfixturevalue("cli").close()


@pytest.fixture(autouse=True)
def _fork_ranks(request: pytest.FixtureRequest, _server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of a test that calls `run_ranks` itself and uses the fixture `python`."""
    if "python" not in request.fixturenames:
        return
    start_rank = ProcessMonitor._start

    def fork_rank(monitor: ProcessMonitor, command: list[str]) -> Any:
        if command[0] != sys.executable:
            return start_rank(monitor, command)
        streams = (None, None, monitor.launcher_log)
        return _server.start(Path.cwd(), *command[1:], streams=streams, environment=_child_environment())

    monkeypatch.setattr(ProcessMonitor, "_start", fork_rank)


@pytest.fixture(autouse=True, scope="session")
def _fork_scripts(_server: ForkServer) -> Iterator[None]:
    """Fork the scripts of a test that calls `audit_script` or `ScriptHost` itself."""
    simulated_sys = _SimulatedSys(_server)
    with pytest.MonkeyPatch.context() as patch:
        for module in (everyrank.audit.start, everyrank.rerun.host):
            patch.setattr(module, "sys", simulated_sys)
        yield


class _SimulatedSys:
    """A replacement of `sys` with an `executable` whose processes are forked. Its first use starts the fork server."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server

    @property
    def executable(self) -> str:
        """Return the path of a `python` that starts a forked process."""
        return str(self.server.programs / "python")


@pytest.fixture(autouse=True)
def _check_for_leaks() -> Iterator[None]:
    """Fail a test that leaks environment variables or a process group into the next one."""
    old_environment = dict(os.environ)
    yield
    names = old_environment.keys() | os.environ.keys()
    changed = {name for name in names if old_environment.get(name) != os.environ.get(name)}
    # torch sets its cache folder itself when an optimizer is first built
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    assert not changed, f"the test changed environment variables: {sorted(changed)}"
    if "torch" in sys.modules:
        import torch.distributed as dist

        assert not dist.is_initialized(), "the test left a process group open"


@pytest.fixture(autouse=True, scope="session")
def _check_launcher_variables() -> None:
    """Fail if a launcher has started this run, because its variables would mislead the ranks of the tests."""
    set_variables = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    assert not set_variables, f"unset {', '.join(set_variables)} before running the tests"


@pytest.fixture(autouse=True, scope="session")
def _use_batch_scheduling() -> None:
    """Use the scheduling policy SCHED_BATCH, under which a thread does not preempt the thread that wakes it up.

    Otherwise gloo's threads preempt the sending thread, and spin because it holds their lock. With four ranks on two
    cores they would spin for a third of the time.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux has it; child processes inherit the policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(autouse=True, scope="session")
def _restore_signal_handlers() -> None:
    """Restore the handlers of SIGINT and SIGHUP.

    A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. All child processes would inherit
    this.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the folder of the checkout."""
    return Path(__file__).parents[1]
