"""A pytest plugin: run a function, or a whole test, on several ranks.

    def test_mean(ranks):
        assert ranks(4, backend="gloo").run(my_mean, 3.0) == [3.0] * 4

    @pytest.mark.ranks(2)
    def test_sum():                     # runs on each of 2 ranks
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value == 2

The first test starts a process that imports torch; ranks are forks of it. `docs/testing.md` shows more.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from everyrank.errors import EveryrankError, UsageError, is_user_code
from everyrank.launch import Launch, run_ranks
from everyrank.launch.zygote import Zygote

__all__ = ["Ranks", "ranks"]

_MODULES = (
    "torch",
    "torch._dynamo",  # optimizers import it
    "torch.nn.parallel",
    "torch.utils.data",
    "everyrank.script.function",
    "_pytest.assertion.rewrite",
    "_pytest.outcomes",
    "pytest",
)
_TIMEOUT_SECONDS = 60.0
_LAST_LINES = 40


class Ranks:
    """Starts ranks for a test. `ranks(4, backend="gloo", timeout=30)` is a copy with these settings.

    processes   number of ranks
    backend     gloo, shm or nccl for torch.distributed, which is initialized around the function; None: not
                initialized, and the function calls `init_process_group` itself
    device      cpu or cuda
    timeout     seconds after which the ranks are ended, and the failure explains where each of them was
    """

    def __init__(
        self,
        zygote: Zygote,
        processes: int = 2,
        *,
        backend: str | None = "gloo",
        device: str = "cpu",
        timeout: float = _TIMEOUT_SECONDS,
    ) -> None:
        self.zygote, self.processes, self.backend, self.device = zygote, processes, backend, device
        self.timeout = timeout

    def __call__(self, processes: int, **settings: Any) -> Ranks:
        """The same with a different number of ranks, and other settings."""
        mine: dict[str, Any] = {"backend": self.backend, "device": self.device, "timeout": self.timeout}
        return Ranks(self.zygote, processes, **{**mine, **settings})

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `function(*arguments, **keywords)` on each rank. Returns the results by rank.

        The function, its arguments and results are pickled by value, so lambdas, closures, functions and classes of
        the test file work. Tensors of results should be on the CPU.

        Raises `RankFailedError` with the error of the rank that failed first and its traceback, `UsageError` for what
        cannot be pickled. Skips the test if a rank calls `pytest.skip`.
        """
        __tracebackhide__ = True
        seconds = self.timeout + 30.0  # for a collective, so that the autopsy comes first
        arguments = (self.backend, seconds, _pickled(function, arguments, keywords))
        logs = Path(tempfile.mkdtemp(prefix="everyrank-logs-"))
        launch = Launch(processes=self.processes, device=self.device, logs=logs)
        failure: EveryrankError | None = None
        results: dict[int, Any] = {}
        try:
            name = "everyrank.script.function:run_function_rank"
            results = run_ranks(launch, name, *arguments, zygote=self.zygote, limit_seconds=self.timeout)
        except EveryrankError as error:
            failure = error.with_traceback(None)
            if error.log is not None:
                failure.add_note(_tail(error.log))
                failure.log = None
        finally:
            shutil.rmtree(logs, ignore_errors=True)
        if failure is not None:
            raise failure from None
        for result in results.values():
            if type(result).__name__ == "Skipped":
                pytest.skip(result.reason)
        return [cloudpickle.loads(results[rank]) for rank in sorted(results)]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Run functions on several ranks: `ranks(4, backend="gloo").run(function, *arguments)`."""
    return _ranks_of(request.node)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "ranks(processes, backend='gloo', timeout=60): run the test on each of so many ranks (everyrank)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the marker on each rank, unless it uses the fixture."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None or "ranks" in pyfuncitem.fixturenames:
        return None
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        raise UsageError(f"{pyfuncitem.name}: @pytest.mark.ranks does not run coroutines")
    names = pyfuncitem._fixtureinfo.argnames  # pyright: ignore[reportPrivateUsage]
    keywords = {name: pyfuncitem.funcargs[name] for name in names}
    _ranks_of(pyfuncitem).run(pyfuncitem.obj, **keywords)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that forks ranks."""
    zygote = config.stash.get(_ZYGOTE, None)
    if zygote is not None:
        zygote.close()


_ZYGOTE = pytest.StashKey[Zygote]()


def _ranks_of(node: pytest.Item) -> Ranks:
    """The `Ranks` with the settings of the marker of this test."""
    if _ZYGOTE not in node.config.stash:
        node.config.stash[_ZYGOTE] = Zygote(_MODULES)
    marker = node.get_closest_marker("ranks")
    arguments, keywords = (marker.args, marker.kwargs) if marker is not None else ((), {})
    if arguments and not isinstance(arguments[0], int):
        raise UsageError(f"@pytest.mark.ranks({arguments[0]!r}): give a number of processes")
    try:
        return Ranks(node.config.stash[_ZYGOTE], *arguments, **keywords)
    except TypeError as error:
        raise UsageError(f"@pytest.mark.ranks: {error}; give (processes, backend=..., timeout=...)") from None


def _pickled(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
    """The call, with the functions and classes of the test's file by value: ranks need not import that file."""
    module = inspect.getmodule(function)
    is_by_value = module is not None and is_user_code(getattr(module, "__file__", None) or "<unknown>")
    with contextlib.ExitStack() as stack:
        if is_by_value and module is not None and module.__name__ != "__main__":
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            return cloudpickle.dumps((_call, (function, *arguments), keywords))
        except Exception as error:
            raise UsageError(
                f"{getattr(function, '__name__', function)}: it or one of its arguments cannot be sent to the ranks "
                f"({type(error).__name__}: {error}); make it inside the function"
            ) from None


def _call(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> bytes:
    """Call the function on a rank; the result is pickled by value, because its class may be of the test's file."""
    result = function(*arguments, **keywords)
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        name = getattr(function, "__name__", function)
        raise UsageError(
            f"{name}: its result cannot be sent from the ranks ({type(error).__name__}: {error}); return numbers, "
            "tensors, or lists of them"
        ) from None


def _tail(log: Path) -> str:
    """The end of the log of a rank: what it printed, and its traceback."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"the end of the output of {log.stem}:", *lines[-_LAST_LINES:]])
