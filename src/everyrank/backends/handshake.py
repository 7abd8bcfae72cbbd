"""Waits for another rank's entry in the store while a group is made."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from everyrank.errors import RankFailedError

__all__ = ["handshake"]


def handshake(store: dist.Store, key: str, rank: int, phase: str, timeout_seconds: float) -> Any:
    """Wait until `rank` has written the entry `key` to the store; return it, decoded from JSON.

    Raises `RankFailedError` with `rank` and `phase` after the timeout, or if the store no longer answers.
    """
    deadline, pause_seconds = time.monotonic() + timeout_seconds, 0.0002
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise RankFailedError(f"rank {rank} did not reach the {phase} within {timeout_seconds:g} s (--timeout)")
            time.sleep(pause_seconds)
            pause_seconds = min(0.02, pause_seconds * 1.5)
        return json.loads(store.get(key))
    except RuntimeError as error:  # torch's DistNetworkError
        raise RankFailedError(f"the store no longer answers: {str(error).splitlines()[0]}") from error
