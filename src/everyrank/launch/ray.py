"""ray: Ray places one actor for each rank, and each actor starts its rank on its own host.

The driver is a process of its own (ray_driver.py), so that this module, like all of them, imports neither.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyrank.errors import CannotRunError, UsageError
from everyrank.launch.job import PYTHON, Launch
from everyrank.launch.launcher import Launcher

__all__ = ["LAUNCHER", "RayOptions", "find", "render", "visible_devices"]


@dataclass(frozen=True)
class RayOptions:
    """Ray's own options.

    address    of its cluster; None: one of this machine, started for the run
    restarts   how often all ranks are placed and started again after one, or its actor or node, was lost
    """

    address: str | None = None
    restarts: int = 0


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv: the driver, which asks the cluster for a place for each rank."""
    devices = {"cuda": "gpu", "cpu": "cpu"}.get(launch.device or "", "any")
    command = [*PYTHON, "-m", "everyrank.launch.ray_driver", str(directory), str(launch.processes), devices]
    restarts = [str(launch.options.restarts)] if launch.options.restarts else []
    return [[*command, launch.options.address or "local", *restarts]]


def visible_devices(devices: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that show a rank these devices ("0,1"; "": as it is), where Ray has shown its actor one alone.

    ROCm goes by HIP_VISIBLE_DEVICES, which Ray sets there, and looks at CUDA's name where that is not set.
    """
    names = ["CUDA_VISIBLE_DEVICES"]
    if "HIP_VISIBLE_DEVICES" in environment:
        names.append("HIP_VISIBLE_DEVICES")
    return dict.fromkeys(names, devices) if devices else {}


def find() -> str:
    """Raises `CannotRunError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise CannotRunError("--launcher ray: Ray is not installed here; pip install 'everyrank[ray]'")
    return "starts in this Python"


def _check(launch: Launch) -> None:
    if launch.options.restarts < 0:
        raise UsageError(f"--restarts {launch.options.restarts}: give 0 or more")
    if launch.nodes > 1:
        raise UsageError(f"--nodes {launch.nodes}: Ray chooses the hosts itself; leave it out")


def _add_arguments(group: Any) -> None:
    group.add_argument("--address", metavar="A", help="ray: of the cluster; default: one on this machine")


def _read_options(args: argparse.Namespace, is_chosen: bool) -> RayOptions:
    if args.address is not None and not is_chosen:
        raise UsageError(f"--address {args.address}: it is that of a Ray cluster; give --launcher ray too")
    return RayOptions(args.address, args.restarts if is_chosen else 0)


LAUNCHER = Launcher(
    name="ray",
    render=render,
    find=find,
    check=_check,
    options=RayOptions,
    add_arguments=_add_arguments,
    read_options=_read_options,
    takes_arguments=False,
    restarts_ranks=lambda options: options.restarts > 0,
    needs_sigterm=True,
    needs_package=("ray", "pip install 'everyrank[ray]'"),
)
