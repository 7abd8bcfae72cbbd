"""Who waits for whom, over the store. Every wait has a timeout that names who was missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from everyrank.errors import EveryrankError, RankFailedError, kind_named
from everyrank.world.world import World, single_process_world, use_threads

__all__ = ["broadcast_text", "do_all_ranks_agree", "from_rank_0", "on_each_rank", "on_rank_0", "store_barrier"]

T = TypeVar("T")


def store_barrier(world: World, where: str) -> None:
    """Wait until every rank has come to `where` (a name used once). Raises `RankFailedError` naming the missing."""
    world.store.set(f"{where}/{world.rank}", "here")
    deadline = time.monotonic() + world.timeout_seconds
    missing = list(range(world.size))
    pause = 0.001
    while missing := _not_there(world, where, missing):
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankFailedError(
                f"rank{'s' * (len(missing) > 1)} {names} did not come to the {where} "
                f"within {world.timeout_seconds:g} s ({world.start_flag})"
            )
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)


def _not_there(world: World, where: str, ranks: list[int]) -> list[int]:
    try:
        return [rank for rank in ranks if not world.store.check([f"{where}/{rank}"])]
    except RuntimeError as error:  # torch's DistNetworkError
        raise RankFailedError(
            f"rank 0 went away before the {where}: its store no longer answers ({str(error).splitlines()[0]})"
        ) from error


def do_all_ranks_agree(world: World, key: str, seconds: float = 10.0) -> bool:
    """Whether every rank calls this with `key` (a name used once) within `seconds`.

    For a problem that a rank sees by itself: one that all ranks see can be raised on all of them alike.
    """
    world.store.add(f"agree/{key}", 1)
    deadline = time.monotonic() + seconds
    while world.store.add(f"agree/{key}", 0) < world.size:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def broadcast_text(world: World, key: str, text: str | None) -> str:
    """Rank 0's `text` under `key` (a name used once) on every rank; the others pass None and wait as long as it takes.

    There is no time limit, because rank 0 may be training alone; the launcher ends this rank when rank 0 dies.
    """
    if world.rank == 0:
        assert text is not None
        world.store.set(f"tell/{key}", text)
        return text
    return _wait_for_text(world, f"tell/{key}")


def _wait_for_text(world: World, name: str) -> str:
    """What stands under this name, when it does."""
    pause = 0.001
    while not world.store.check([name]):
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return world.store.get(name).decode()


def on_rank_0(world: World, key: str, function: Callable[[], T]) -> T | None:
    """Call `function` on rank 0, with all the threads of the host, while the others wait; None on those.

    What it raises is raised on every rank: a workload that is wrong is wrong everywhere.
    """
    return _on_rank_0(world, key, function, lambda _: "")[0]


def from_rank_0(world: World, key: str, function: Callable[[], Any]) -> Any:
    """`on_rank_0`, and what the function returns (of what JSON can carry) on every rank."""
    return json.loads(_on_rank_0(world, key, function, json.dumps)[1])


def on_each_rank(world: World, key: str, function: Callable[[], T]) -> T:
    """Call `function` on every rank, each at its own pace and without collectives; its own result.

    What it raises on one rank is raised on all of them. As long as one rank works, the others wait; the launcher ends
    them when it dies. `key` is a name used once.
    """
    own: EveryrankError | None = None
    result: T | None = None
    try:
        result = function()
    except EveryrankError as error:
        own = error
    tell_all = f"{type(own).__name__}\n{own}" if own is not None else ""
    world.store.set(f"each/{key}/{world.rank}", tell_all)
    for rank in range(world.size):
        error, _, text = _wait_for_text(world, f"each/{key}/{rank}").partition("\n")
        if own is None and error:
            raise kind_named(error)(text)
    if own is not None:
        raise own
    return result  # type: ignore[return-value]


def _on_rank_0(world: World, key: str, function: Callable[[], T], encode: Callable[[T], str]) -> tuple[T | None, str]:
    if world.rank != 0:
        error, _, text = broadcast_text(world, key, None).partition("\n")
        if error:
            raise kind_named(error)(text)
        return None, text
    use_threads(single_process_world(world).threads)
    try:
        result = function()
    except EveryrankError as error:
        broadcast_text(world, key, f"{type(error).__name__}\n{error}")
        raise
    finally:
        use_threads(world.threads)
    return result, broadcast_text(world, key, "\n" + encode(result)).partition("\n")[2]
