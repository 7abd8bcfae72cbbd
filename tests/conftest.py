"""Fixtures for all tests. The `ranks` fixture calls a function in several real processes that share a world."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everyrank.launch.monitor import ProcessMonitor, _child_environment
from forkserver import ForkServer
from processes import Cli, Forge, Pool, command_line, run_cli

os.environ.pop("PYTEST_ADDOPTS", None)  # this run has read it; a pytest that a test starts is another one
# where bytecode is not kept, each of some thousand processes compiles what it imports
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_STARTED_FROM_OUTSIDE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_finish() -> None:
    """What is loaded by now stays: searching it for garbage takes a tenth of the time of a process that waits."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """The process that has imported everything, and forks."""
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
def ranks(forkserver: ForkServer, _pools: dict[int, Pool]) -> Any:
    """`ranks(n, function, *arguments)`: results of `function(world, *arguments)` by rank.

    The processes are kept for the whole run. They meet over a file, so no port is opened. A call that takes too long
    fails with the stack of every rank; an exception in a rank is raised here with its traceback.
    """

    def call(count: int, function: Any, *arguments: Any, timeout: float = 200.0) -> list[Any]:
        if count not in _pools:
            _pools[count] = Pool(forkserver, count)
        try:
            return _pools[count].call(function, arguments, timeout)
        except BaseException:
            _pools.pop(count).close()
            raise

    return call


@pytest.fixture(scope="session")
def forge(forkserver: ForkServer) -> Forge:
    """`forge(folder, "train", "digits", size=2)`: the command line on two ranks that torchrun would have started."""
    return Forge(forkserver)


@pytest.fixture(scope="session")
def everyrank(forkserver: ForkServer) -> Any:
    """`everyrank(folder, "train", "digits", "--processes", 2)`: a command line and the ranks it starts, ended."""
    return functools.partial(run_cli, forkserver)


@pytest.fixture(scope="session")
def programs(forkserver: ForkServer) -> Path:
    """A folder with a `python` and a `torchrun` for a shell whose processes are forked."""
    return forkserver.programs


@pytest.fixture
def forked_ranks(forkserver: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `run_ranks` starts from the test itself is forked, too."""
    start = ProcessMonitor._start

    def fork(monitor: ProcessMonitor, command: list[str]) -> Any:
        if command[0] != sys.executable:
            return start(monitor, command)
        streams = (None, None, monitor.launcher_log)
        return forkserver.python(Path.cwd(), *command[1:], streams=streams, environment=_child_environment())

    monkeypatch.setattr(ProcessMonitor, "_start", fork)


@pytest.fixture(scope="module")
def forked_scripts(programs: Path) -> Iterator[None]:
    """Fork the scripts of `audit_script` and `ScriptHost` also where the test itself calls them."""
    import everyrank.audit.start
    import everyrank.rerun.host

    with pytest.MonkeyPatch.context() as patch:
        for module in (everyrank.audit.start, everyrank.rerun.host):
            patch.setattr(module, "sys", types.SimpleNamespace(executable=str(programs / "python")))
        yield


@pytest.fixture
def cli(forkserver: ForkServer, tmp_path: Path) -> Iterator[Cli]:
    """The same while it runs: `cli.start(...)`, `cli.end()`."""
    with command_line(forkserver, tmp_path) as started:
        yield started


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
    """A shell that runs the tests in its background ignores Ctrl-C for them, and for all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def repository() -> Path:
    """The folder of the checkout."""
    return Path(__file__).parents[1]
