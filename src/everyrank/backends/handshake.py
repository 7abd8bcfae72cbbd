"""Waits for another rank's entry in the store, while a group is made."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from everyrank.errors import RankFailedError

__all__ = ["handshake"]


def handshake(store: dist.Store, name: str, rank: int, where: str, timeout_seconds: float) -> Any:
    """Wait until `rank` has written the entry `name` to the store; return it, decoded from JSON.

    Raises `RankFailedError` with `rank` and `where` after the timeout, or if the store is gone.
    """
    deadline, pause = time.monotonic() + timeout_seconds, 0.0002
    try:
        while not store.check([name]):
            if time.monotonic() > deadline:
                raise RankFailedError(f"rank {rank} did not reach the {where} within {timeout_seconds:g} s (--timeout)")
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return json.loads(store.get(name))
    except RuntimeError as error:  # torch's DistNetworkError
        raise RankFailedError(f"the store no longer answers: {str(error).splitlines()[0]}") from error
