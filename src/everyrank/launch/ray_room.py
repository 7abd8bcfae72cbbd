"""Room for ranks in a Ray cluster: how much there is, what is reserved, and which nodes are lost. For ray_driver.py."""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["SETTLE_SECONDS", "Wanted", "has_lost_one_of", "is_there", "num_places", "release", "reserve"]

_ray: Any = importlib.import_module("ray")  # an extra, which the type checker need not have
_groups: Any = importlib.import_module("ray.util")
SETTLE_SECONDS = 10.0  # until Ray has noticed what is free again, and what is gone
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Wanted:
    """How many ranks, and what of the cluster each takes."""

    least: int
    most: int
    each: dict[str, float]

    def room_in(self, resources: dict[str, float]) -> int:
        """How many ranks these suffice for."""
        return int(min(resources.get(name, 0.0) // amount for name, amount in self.each.items()))


def reserve(wanted: Wanted, count: int) -> Any:
    """Ray's reservation for so many ranks, which it may not have yet."""
    return _groups.placement_group([wanted.each] * count, strategy="PACK")


def release(group: Any) -> None:
    """Give a reservation back."""
    _groups.remove_placement_group(group)


def is_there(group: Any) -> bool:
    """Whether Ray has found room for a reservation."""
    return _groups.placement_group_table(group)["state"] == "CREATED"


def has_lost_one_of(nodes: set[str]) -> bool:
    """Whether one of these nodes is gone, of which Ray may hear later than of the actors on it."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        if nodes - {node["NodeID"] for node in _ray.nodes() if node["Alive"]}:
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def num_places(wanted: Wanted) -> int:
    """For how many ranks there is room. What an attempt before this one had is free a moment later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        in_all = sum(wanted.room_in(node["Resources"]) for node in _ray.nodes() if node["Alive"])
        free = min(in_all, wanted.room_in(_ray.available_resources()), wanted.most)
        if free == min(in_all, wanted.most) or time.monotonic() > deadline:
            return max(free, wanted.least)
        time.sleep(_LOOK_SECONDS)
