"""ray: Ray places one actor for each rank, and each actor starts its rank on its own host.

The driver is a process of its own (ray_driver.py), so that this module, like all of them, imports neither.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from everyrank.errors import CannotRunError
from everyrank.launch.job import Launch
from everyrank.launch.spawn import PYTHON

__all__ = ["render", "require"]


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv: the driver, which asks the cluster for a place for each rank."""
    devices = {"cuda": "gpu", "cpu": "cpu"}.get(launch.device or "", "any")
    command = [*PYTHON, "-m", "everyrank.launch.ray_driver", str(directory), str(launch.processes), devices]
    return [[*command, launch.address or "local"]]


def require() -> None:
    """Raises `CannotRunError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise CannotRunError("--launcher ray: Ray is not installed here; pip install 'everyrank[ray]'")
