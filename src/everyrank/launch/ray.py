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

    address         of its cluster; None: one of this machine, started for the run
    restarts        how often all ranks are placed and started again after one, or its actor or node, was lost
    min_processes   begin with as few ranks where the cluster has no more room, go on with as few where a node was lost,
                    and take new ones in; None: their number stays
    """

    address: str | None = None
    restarts: int = 0
    min_processes: int | None = None


def render(launch: Launch, directory: Path) -> list[list[str]]:
    """One argv: the driver, which asks the cluster for a place for each rank."""
    devices = {"cuda": "gpu", "cpu": "cpu"}.get(launch.device or "", "any")
    options: RayOptions = launch.options
    count = f"{launch.processes}" if options.min_processes is None else f"{options.min_processes}:{launch.processes}"
    command = [*PYTHON, "-m", "everyrank.launch.ray_driver", str(directory), count, devices]
    restarts = [str(options.restarts)] if options.restarts else []
    return [[*command, options.address or "local", *restarts]]


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
    options: RayOptions = launch.options
    if options.restarts < 0:
        raise UsageError(f"--restarts {options.restarts}: give 0 or more")
    if options.min_processes is not None and not 1 <= options.min_processes <= launch.processes:
        raise UsageError(f"--min-processes {options.min_processes}: give 1 to {launch.processes} (--processes)")
    if launch.nodes > 1:
        raise UsageError(f"--nodes {launch.nodes}: Ray chooses the hosts itself; leave it out")


def _add_arguments(group: Any) -> None:
    group.add_argument("--address", metavar="A", help="ray: of the cluster; default: one on this machine")
    group.add_argument(
        "--min-processes", type=int, metavar="N", help="ray: go on with as few ranks, and take new ones in"
    )


def _read_options(args: argparse.Namespace, is_chosen: bool) -> RayOptions:
    if args.address is not None and not is_chosen:
        raise UsageError(f"--address {args.address}: it is that of a Ray cluster; give --launcher ray too")
    if args.min_processes is not None and not is_chosen:
        raise UsageError(f"--min-processes {args.min_processes}: it is Ray that has places; give --launcher ray too")
    return RayOptions(args.address, args.restarts if is_chosen else 0, args.min_processes)


def _is_elastic(options: RayOptions) -> bool:
    return options.min_processes is not None


LAUNCHER = Launcher(
    name="ray",
    render=render,
    find=find,
    check=_check,
    options=RayOptions,
    add_arguments=_add_arguments,
    read_options=_read_options,
    takes_arguments=False,
    restarts_ranks=lambda options: options.restarts > 0 or _is_elastic(options),
    min_processes=lambda options: options.min_processes,
    limits_start=_is_elastic,
    needs_sigterm=True,
    needs_package=("ray", "pip install 'everyrank[ray]'"),
)
