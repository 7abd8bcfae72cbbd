"""Barriers and broadcasts over the store. A barrier that times out names the missing ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from everyrank.errors import EveryrankError, RankFailedError, kind_named
from everyrank.world.world import World, single_process_world, use_threads

__all__ = [
    "broadcast_text",
    "do_all_ranks_agree",
    "from_rank_0",
    "missing_ranks",
    "on_each_rank",
    "on_rank_0",
    "store_barrier",
]

T = TypeVar("T")


def store_barrier(world: World, where: str) -> None:
    """Wait until every rank has reached the barrier `where` (a name used once).

    Raises `RankFailedError` with the missing ranks after `world.timeout_seconds`.
    """
    missing = _wait_for_ranks(world, where, world.timeout_seconds)
    if missing:
        names = ", ".join(map(str, missing))
        raise RankFailedError(
            f"rank{'s' * (len(missing) > 1)} {names} did not reach the {where} barrier "
            f"within {world.timeout_seconds:g} s ({world.start_flag})"
        )


def _wait_for_ranks(world: World, where: str, seconds: float) -> list[int]:
    """Register this rank at `where` and wait for the others; return the ranks that are missing after `seconds`."""
    world.store.set(f"{where}/{world.rank}", "here")
    deadline = time.monotonic() + seconds
    missing = list(range(world.size))
    pause = 0.001
    while (missing := missing_ranks(world, where, missing)) and time.monotonic() <= deadline:
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return missing


def missing_ranks(world: World, where: str, ranks: list[int]) -> list[int]:
    """Return those of `ranks` that have not registered at `where`."""
    try:
        return [rank for rank in ranks if not world.store.check([f"{where}/{rank}"])]
    except RuntimeError as error:  # torch's DistNetworkError
        raise RankFailedError(
            f"rank 0 ended before the {where} barrier: its store no longer answers ({str(error).splitlines()[0]})"
        ) from error


def do_all_ranks_agree(world: World, key: str, seconds: float = 10.0) -> bool:
    """Whether every rank calls this with `key` (a name used once) within `seconds`.

    Use it for an error that may occur on only some ranks. An error on all ranks can be raised without it.
    """
    return not _wait_for_ranks(world, f"agree/{key}", seconds)


def broadcast_text(world: World, key: str, text: str | None) -> str:
    """Return rank 0's `text` on every rank. `key` is a name used once; the other ranks pass None and wait.

    There is no timeout, because rank 0 may be training a reference run. The launcher ends this rank if rank 0 dies.
    """
    if world.rank == 0:
        assert text is not None
        world.store.set(f"tell/{key}", text)
        return text
    return _wait_for_text(world, f"tell/{key}")


def _wait_for_text(world: World, name: str) -> str:
    """Wait without a timeout until the store has a value under `name`, and return it."""
    pause = 0.001
    while not world.store.check([name]):
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return world.store.get(name).decode()


def on_rank_0(world: World, key: str, function: Callable[[], T]) -> T | None:
    """Call `function` on rank 0 with all CPU threads of the host, while the other ranks wait. Returns None on those.

    An `EveryrankError` of the function is raised on every rank.
    """
    return _on_rank_0(world, key, function, lambda _: "")[0]


def from_rank_0(world: World, key: str, function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0 and return its result, a value that JSON can represent, on every rank."""
    return json.loads(_on_rank_0(world, key, function, json.dumps)[1])


def on_each_rank(world: World, key: str, function: Callable[[], T]) -> T:
    """Call `function`, which uses no collectives, on every rank; return the result of this rank.

    An `EveryrankError` of one rank is raised on all ranks. There is no timeout: the launcher ends the waiting ranks if
    one dies. `key` is a name used once.
    """
    local_error: EveryrankError | None = None
    result: T | None = None
    try:
        result = function()
    except EveryrankError as error:
        local_error = error
    report = f"{type(local_error).__name__}\n{local_error}" if local_error is not None else ""
    world.store.set(f"each/{key}/{world.rank}", report)
    for rank in range(world.size):
        error, _, text = _wait_for_text(world, f"each/{key}/{rank}").partition("\n")
        if local_error is None and error:
            raise kind_named(error)(text)
    if local_error is not None:
        raise local_error
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
